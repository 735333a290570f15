"""The worker groups of a run as Ray actors: wait for the machines, start the workers, check them, build the models."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from rloom.config.base import RunConfig
from rloom.config.derived import ranks_per_share
from rloom.config.schema import Actor, Config, Critic
from rloom.console import announce
from rloom.errors import ConfigError, WorkerError
from rloom.launch.models import (
    has_reference_model,
    needs_critic,
)
from rloom.launch.reward_model import has_reward_model
from rloom.launch.rewards import queue_of, spread_source
from rloom.launch.worker import FILES, WEIGHT_SYNC, Rendezvous, Worker
from rloom.launch.worker_groups import WorkerGroups, pool_lines
from rloom.runs.metrics import ModelWork, peak_flops_by_name
from rloom.runtime.nodes import head_node, no_ray, wait_until
from rloom.runtime.placement import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD,
    ROLLOUT,
    WorkerLayout,
    worker_layout,
)
from rloom.runtime.process_stats import Machine
from rloom.runtime.secret import OTHER_WAY
from rloom.training.memory import BUILD, explain_out_of_memory

try:
    from rloom.runtime import ray as cluster
except ImportError as error:
    raise ConfigError(no_ray("trainer.nnodes, trainer.n_gpus_per_node")) from error

log = logging.getLogger(__name__)
RETURN_S = 60.0  # time for a lost machine to return
CROWDED = 0.5  # less free memory than this share of a GPU: another process uses it


@contextmanager
def open_cluster(config: RunConfig) -> Iterator[None]:
    """The machines of a run, for all its restarts: this one, those that join it, or a running cluster."""
    announce("Initializing Ray ...")
    trainer, arguments = config.trainer, dict(config.ray_kwargs.ray_init)
    cpus = config.gpus_per_node  # one for each worker: Ray starts as many processes in advance
    with ExitStack() as stack:
        if config.starts_a_cluster:
            stack.enter_context(head_node(trainer.head, cpus=cpus, gpus=torch.cuda.device_count()))
            arguments["address"] = trainer.head
        connect_timeout_s = trainer.start_timeout_s if config.starts_a_cluster else 0.0
        stack.enter_context(cluster.connect(arguments, cpus=cpus, connect_timeout_s=connect_timeout_s))
        if config.starts_a_cluster:
            await_machines(config)
        yield


def await_machines(config: RunConfig) -> None:
    trainer, patience = config.trainer, config.trainer.start_timeout_s
    missing = cluster.missing_numbers(trainer.nnodes)
    if missing:
        log.info(f"Waiting up to {patience:.0f} s for machines {missing} of {trainer.nnodes}")
    try:
        wait_until(lambda: not cluster.missing_numbers(trainer.nnodes), patience, "")
    except WorkerError:
        missing = cluster.missing_numbers(trainer.nnodes)
        raise WorkerError(
            f"trainer.nnodes={trainer.nnodes}: after trainer.start_timeout_s={patience:.0f} these machines have not "
            f"come: {', '.join(f'trainer.node_rank={number}' for number in missing)}. Run the same command there with "
            f"that key and trainer.master_addr={trainer.master_addr} trainer.master_port={trainer.master_port}. Where "
            f"machines do not share trainer.default_local_dir, {OTHER_WAY}"
        ) from None


def needs_of_a_worker(config: RunConfig, layout: WorkerLayout) -> dict[str, float]:
    if config.trainer.device == "cuda" or (config.trainer.device == "auto" and any_gpu()):
        return {"CPU": 1, "GPU": layout.gpus_per_worker}
    return {"CPU": 1}


def any_gpu() -> bool:
    return any(machine.get("GPU", 0) >= 1 for machine in cluster.machines())


def check_machines(config: RunConfig, layout: WorkerLayout) -> None:
    share = node_share(config, layout)
    able = cluster.machines_with(share)
    if able < layout.nodes:
        found = "; ".join(describe_resources(machine) for machine in cluster.machines()) or "none"
        raise WorkerError(
            f"trainer.nnodes={layout.nodes} trainer.n_gpus_per_node={layout.per_node}: {layout.nodes} machines with "
            f"{describe_resources(share)} each are needed, {able} of these are here. The cluster has: {found}"
        )


def shrink_layout(config: RunConfig, layout: WorkerLayout) -> WorkerLayout:
    """After a loss: the same layout if the machines return in time, else one for the machines that are left."""
    share, patience = node_share(config, layout), min(config.trainer.start_timeout_s, RETURN_S)
    try:
        wait_until(lambda: cluster.responsive_machines(share) >= layout.nodes, patience, "")
    except WorkerError:
        left = cluster.responsive_machines(share)
        if not layout.can_shrink(left):
            raise WorkerError(
                f"{left} of {layout.nodes} machines are left, and none came back within {patience:.0f} s; "
                "the same command goes on from the last checkpoint when they are there again"
            ) from None
        smaller = worker_layout(left, layout.per_node, layout.placed, gpus_per_worker=layout.gpus_per_worker)
        check_copies(config, smaller.workers)
        print(f"{left} of {layout.nodes} machines are left: going on with them", flush=True)
        return smaller
    return layout


def check_copies(config: RunConfig, workers: int) -> None:
    """Whether the workers that are left can hold whole copies of the model, or whole sequences."""
    roles = (config.actor_rollout_ref.actor, config.critic) if isinstance(config, Config) else ()
    for role in roles:
        ranks = ranks_per_share(role, workers)
        if workers % ranks:
            raise WorkerError(
                f"{workers} workers are left, and {ranks} of them together hold a copy of the model: they do not "
                "divide. The same command goes on from the last checkpoint when the machines are there again, or with "
                "other sizes"
            )


def node_share(config: RunConfig, layout: WorkerLayout) -> dict[str, float]:
    return {name: amount * layout.per_node for name, amount in needs_of_a_worker(config, layout).items()}


def describe_resources(resources: Mapping[str, float]) -> str:
    return (
        " and ".join(f"{amount:g} {name}" for name, amount in resources.items() if name in ("CPU", "GPU")) or "nothing"
    )


@contextmanager
def ray_workers(config: Config, layout: WorkerLayout, logs: Path | None) -> Iterator[WorkerGroups]:
    for pool in layout.pools:
        for line in pool_lines(config, layout, pool):
            announce(line)
    with start_workers(config, layout, logs, Worker) as (workers, share):
        scorers: list[cluster.RemoteScoreQueue] = []
        try:
            source = spread_source(config)
            for node in range(1, layout.nodes) if source else ():
                scorers.append(cluster.start_reward_actor(share, node, queue_of, (config, source)))
            yield build(config, layout, workers, scorers)
        finally:
            cluster.kill_actors(scorers)


@contextmanager
def start_workers(
    config: RunConfig, layout: WorkerLayout, logs: Path | None, make: Callable[..., object]
) -> Iterator[tuple[list[cluster.RayWorker], Any]]:
    """A Ray actor for each slot, with the object that `make` returns; and Ray's placement group."""
    check_machines(config, layout)
    needs = needs_of_a_worker(config, layout)
    with cluster.reserve(layout.nodes, node_share(config, layout), config.trainer.start_timeout_s) as share:
        workers: list[cluster.RayWorker] = []
        try:
            for slot in layout.slots():
                name = f"worker {slot.number}"
                file = None if logs is None else logs.absolute() / f"worker_{slot.number}.log"
                place = layout.node_of(slot)
                workers.append(cluster.start_worker(share, place, needs, (name, file), make, (config, layout, slot)))
            yield workers, share
        finally:
            cluster.kill_actors(workers)


def build(
    config: Config,
    layout: WorkerLayout,
    workers: Sequence[cluster.RayWorker],
    scorers: Sequence[cluster.RemoteScoreQueue],
) -> WorkerGroups:
    all_workers, machines, work = build_models(config, layout, workers)

    def group(role: str, numbers: Iterable[int], workers_per_share: int = 1) -> cluster.RayGroup:
        return cluster.RayGroup([workers[number] for number in numbers], role, workers_per_share=workers_per_share)

    def trained(role: str, section: Actor | Critic) -> cluster.RayGroup:
        numbers = layout.workers_of(role)
        return group(role, numbers, ranks_per_share(section, len(numbers)))

    actor, rollout = layout.workers_of(ACTOR), layout.workers_of(ROLLOUT)
    reward = layout.workers_of(REWARD) if has_reward_model(config) else ()
    section = config.actor_rollout_ref.actor
    return WorkerGroups(
        policy=trained(ACTOR, section),
        rollout=group(
            ROLLOUT,
            rollout[:1] if config.actor_rollout_ref.rollout.uses_servers else rollout,
            config.actor_rollout_ref.rollout.workers_per_engine,
        ),
        weight_sync=group(WEIGHT_SYNC, sorted({*actor, *rollout})),
        files=group(FILES, actor if config.actor_rollout_ref.rollout.kind.own_model else rollout[:1]),
        critic=trained(CRITIC, config.critic) if needs_critic(config) else None,
        reference=trained(REFERENCE, section) if has_reference_model(config) else None,
        reward=[group(REWARD, [number]) for number in reward],
        all_workers=all_workers,
        work=work,
        scorers=scorers,
        device=torch.device("cpu"),
        devices=layout.devices,
        peak_flops=total_peak_flops(machines, layout),
    )


def build_models(
    config: RunConfig, layout: WorkerLayout, workers: Sequence[cluster.RayWorker], stage: str = BUILD
) -> tuple[cluster.RayGroup, list[Machine], dict[str, ModelWork]]:
    """All workers, their machines, and the work of the models that they have loaded, by role."""
    all_workers = cluster.RayGroup(workers, role=None)
    machines: list[Machine] = all_workers.call("machine")
    inspect(machines, workers, config)
    addresses = all_workers.call("address")
    announce("Loading the models on the workers ...")
    rendezvous = Rendezvous({pool.name: addresses[pool.first] for pool in layout.pools})
    rendezvous[WEIGHT_SYNC] = cluster.RayGroup(workers[:1], role=None).call("address")[0]
    work: dict[str, ModelWork] = {}
    with explain_out_of_memory(stage):
        for found in all_workers.call("build", rendezvous):
            work |= found
    return all_workers, machines, work


def total_peak_flops(machines: Sequence[Machine], layout: WorkerLayout) -> float | None:
    peaks = [peak for machine in machines if machine.gpu and (peak := peak_flops_by_name(machine.gpu)) is not None]
    return layout.gpus_per_worker * sum(peaks) if peaks and len(peaks) == len(machines) else None


def inspect(machines: Sequence[Machine], workers: Sequence[cluster.RayWorker], config: RunConfig) -> None:
    """Log the machine of each worker and check its GPU, before anything large is loaded."""
    for worker, machine in zip(workers, machines, strict=True):
        gpu = f", {machine.gpu} with {machine.gpu_free_gib:.0f} GiB free" if machine.gpu else ""
        log.info(
            f"{worker.name}: process {machine.process} on {machine.node}, "
            f"{machine.memory_gib:.0f} GiB of memory free{gpu}"
        )
        if machine.gpu and machine.gpu_free_gib < CROWDED * machine.gpu_total_gib:
            log.warning(
                f"{worker.name}: only {machine.gpu_free_gib:.0f} of {machine.gpu_total_gib:.0f} GiB of its GPU are "
                "free; is another process on it?"
            )
        if machine.gpu is None and config.trainer.device == "cuda":
            raise WorkerError(f"trainer.device=cuda: {worker.name} on {machine.node} sees no GPU")
