"""The machines of a run as a Ray cluster: start or join it, wait for its machines, place workers on them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from rloom.config.base import RunConfig
from rloom.config.derived import ranks_per_share
from rloom.config.schema import Config
from rloom.console import announce
from rloom.errors import ConfigError, WorkerError
from rloom.launch.directory import directory_of
from rloom.rewards.score_queue import FutureQueue
from rloom.runtime.joining import join_run
from rloom.runtime.nodes import head_node, no_ray, wait_until
from rloom.runtime.placement import WorkerLayout, WorkerSlot, worker_layout
from rloom.runtime.remote import RemoteWorker
from rloom.runtime.secret import OTHER_WAY

try:
    from rloom.runtime import ray as cluster
except ImportError as error:
    raise ConfigError(no_ray()) from error

log = logging.getLogger(__name__)
RETURN_S = 60.0  # time for a lost machine to return


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


def join(config: RunConfig) -> int:
    """This machine joins the run of machine 0, whose processes start the workers."""
    trainer = config.trainer
    join_run(
        trainer.head,
        trainer.node_rank,
        directory=lambda: directory_of(config),
        cpus=config.gpus_per_node,
        gpus=torch.cuda.device_count(),
        timeout_s=trainer.start_timeout_s,
        report=print,
    )
    return 0


def await_machines(config: RunConfig) -> None:
    trainer, timeout_s = config.trainer, config.trainer.start_timeout_s
    missing = cluster.missing_numbers(trainer.nnodes)
    if missing:
        log.info(f"Waiting up to {timeout_s:.0f} s for machines {missing} of {trainer.nnodes}")
    try:
        wait_until(lambda: not cluster.missing_numbers(trainer.nnodes), timeout_s, "")
    except WorkerError:
        missing = cluster.missing_numbers(trainer.nnodes)
        raise WorkerError(
            f"trainer.nnodes={trainer.nnodes}: after trainer.start_timeout_s={timeout_s:.0f} these machines have not "
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
    share, timeout_s = node_share(config, layout), min(config.trainer.start_timeout_s, RETURN_S)
    try:
        wait_until(lambda: cluster.responsive_machines(share) >= layout.nodes, timeout_s, "")
    except WorkerError:
        left = cluster.responsive_machines(share)
        if not layout.can_shrink(left):
            raise WorkerError(
                f"{left} of {layout.nodes} machines are left, and none came back within {timeout_s:.0f} s; "
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


class RayMachines:
    """Starts workers on the machines that are reserved for the run."""

    def __init__(self, config: RunConfig, layout: WorkerLayout, share: Any) -> None:
        self.layout, self.share, self.needs = layout, share, needs_of_a_worker(config, layout)
        self.started: list[cluster.RayWorker] = []

    def start(
        self, slot: WorkerSlot, name: str, log_file: Path | None, make: Callable[..., Any], *arguments: Any
    ) -> RemoteWorker:
        place = self.layout.node_of(slot)
        worker = cluster.start_worker(self.share, place, self.needs, (name, log_file), make, arguments)
        self.started.append(worker)
        return worker

    def start_scoring(self, make: Callable[..., Any], *arguments: Any) -> list[FutureQueue]:
        """One queue on each machine but the first, which scores in the driver."""
        queues: list[FutureQueue] = []
        for node in range(1, self.layout.nodes):
            queue = cluster.start_reward_actor(self.share, node, make, arguments)
            self.started.append(queue.worker)
            queues.append(queue)
        return queues


@contextmanager
def reserved_machines(config: RunConfig, layout: WorkerLayout) -> Iterator[RayMachines]:
    check_machines(config, layout)
    with cluster.reserve(layout.nodes, node_share(config, layout), config.trainer.start_timeout_s) as share:
        machines = RayMachines(config, layout, share)
        try:
            yield machines
        finally:
            cluster.kill_workers(machines.started)
