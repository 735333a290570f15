"""The workers of a run and the group that holds each role: in this process, in processes of this machine, or on Ray."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rloom.config.batching import ranks_per_share
from rloom.config.run_config import RunConfig
from rloom.config.schema import Actor, Config, Critic
from rloom.errors import ConfigError, WorkerError
from rloom.gpus import CHOICE, device_names
from rloom.launch.models import has_reference_model, needs_critic, rollout_backend, rollout_has_own_model
from rloom.launch.reward_model import has_reward_model
from rloom.launch.rewards import queue_of, spread_source
from rloom.launch.worker import FILES, WEIGHT_SYNC, Rendezvous, Worker
from rloom.rewards.background import FutureQueue
from rloom.runs.metrics import ModelWork, device_peak_flops, peak_flops_by_name
from rloom.runtime import processes, remote
from rloom.runtime.group import Group, LocalGroup
from rloom.runtime.placement import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD,
    ROLLOUT,
    Pool,
    WorkerLayout,
    WorkerSlot,
    named_workers,
)
from rloom.runtime.process_stats import Machine
from rloom.startup import announce
from rloom.training.memory import BUILD, explain_out_of_memory

log = logging.getLogger(__name__)
CROWDED = 0.5  # less free memory than this share of a GPU: another process uses it
# A switch for tests: the workers of a machine share its first GPU and communicate over gloo, which is slow.
SHARE_GPU = "RLOOM_TEST_SHARE_GPU"


@dataclass(frozen=True)
class WorkerGroups:
    """The group of workers that holds each role."""

    policy: Group
    rollout: Group
    weight_sync: Group  # the workers that take part when weights go from actor to rollout
    files: Group  # one worker that has all weights of the policy, or the workers that have them together
    critic: Group | None
    reference: Group | None
    reward: Sequence[Group]  # one for each worker that holds the reward model
    all_workers: Group | None  # None: this process
    work: Mapping[str, ModelWork]  # of the models, by role, where it is known
    scorers: Sequence[FutureQueue]  # rewards on other machines
    device: torch.device  # of the loop itself
    devices: int  # of all workers
    peak_flops: float | None  # of all devices together, if known

    @property
    def stop_ids(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.files.call("stop_ids")[0]
        return found


def layout_of(config: RunConfig) -> WorkerLayout:
    share = os.environ.get(SHARE_GPU, "0")
    if share not in ("0", "1"):
        raise ConfigError(f"{SHARE_GPU}={share}: use 1 to put all workers of a machine on one GPU, or leave it out")
    return config.layout(1 / config.gpus_per_node if share == "1" else 1.0)


def used_roles(config: Config, pool: Pool) -> list[str]:
    """The roles of a pool that this run has: actor, critic, rollout."""
    used = {REFERENCE: has_reference_model, CRITIC: needs_critic, REWARD: has_reward_model}
    return [role for role in pool.roles if role not in used or used[role](config)]


def pool_lines(config: Config, layout: WorkerLayout, pool: Pool) -> Iterator[str]:
    """Lines of the start: where each role of a pool is."""
    first, *others = used_roles(config, pool)
    yield f"Creating {first.capitalize()} worker pool: {pool.size} worker{'s' * (pool.size > 1)} ..."
    for role in others:
        where = named_workers(layout.placed[role]) if role in layout.placed else f"the workers of {first}"
        yield f"Creating {role.capitalize()} worker pool: {where} ..."


def in_this_process(config: Config, layout: WorkerLayout) -> WorkerGroups:
    [slot] = layout.slots()
    worker = Worker(config, layout, slot)
    announce(f"Creating {', '.join(used_roles(config, slot.pool))} in this process ...")
    with explain_out_of_memory(BUILD):
        work = worker.build(Rendezvous())

    def group(role: str) -> Group:
        return LocalGroup([worker.roles[role]])

    return WorkerGroups(
        policy=group(ACTOR),
        rollout=group(ROLLOUT),
        weight_sync=group(WEIGHT_SYNC),
        files=group(FILES),
        critic=group(CRITIC) if needs_critic(config) else None,
        reference=group(REFERENCE) if has_reference_model(config) else None,
        reward=[group(REWARD)] if has_reward_model(config) else [],
        all_workers=None,
        work=work,
        scorers=(),
        device=worker.device,
        devices=layout.devices,
        peak_flops=device_peak_flops(worker.device),
    )


class Machines(Protocol):
    """Starts workers."""

    def start(
        self, slot: WorkerSlot, name: str, log_file: Path | None, make: Callable[..., Any], *arguments: Any
    ) -> remote.RemoteWorker: ...

    def start_scoring(self, make: Callable[..., Any], *arguments: Any) -> Sequence[FutureQueue]:
        """Queues of scores on the machines other than that of the driver."""


class ThisMachine:
    """Starts workers as processes of this machine, each with a GPU of its own where there are GPUs."""

    def __init__(self, config: RunConfig, layout: WorkerLayout) -> None:
        self.layout, self.timeout_s = layout, config.trainer.start_timeout_s
        self.gpus = [] if config.trainer.device == "cpu" else device_names(os.environ)
        if (self.gpus or config.trainer.device == "cuda") and len(self.gpus) < layout.devices:
            raise WorkerError(
                f"trainer.n_gpus_per_node={layout.per_node}: {layout.devices} GPUs are needed, this machine shows "
                f"{len(self.gpus)} ({CHOICE}={os.environ.get(CHOICE, '')})"
            )
        self.started: list[processes.WorkerProcess] = []

    def start(
        self, slot: WorkerSlot, name: str, log_file: Path | None, make: Callable[..., Any], *arguments: Any
    ) -> remote.RemoteWorker:
        gpu = self.gpus[int(slot.number * self.layout.gpus_per_worker)] if self.gpus else ""
        worker = processes.WorkerProcess(name, log_file, {CHOICE: gpu}, make, arguments, timeout_s=self.timeout_s)
        self.started.append(worker)
        return worker

    def start_scoring(self, make: Callable[..., Any], *arguments: Any) -> Sequence[FutureQueue]:
        return ()


@contextmanager
def open_machines(config: RunConfig, layout: WorkerLayout) -> Iterator[Machines]:
    if config.uses_ray:
        from rloom.launch.ray_cluster import reserved_machines  # Ray is an extra

        with reserved_machines(config, layout) as machines:
            yield machines
        return
    here = ThisMachine(config, layout)
    try:
        yield here
    finally:
        processes.kill_workers(here.started)


@contextmanager
def open_workers(config: Config, layout: WorkerLayout, logs: Path | None) -> Iterator[WorkerGroups]:
    """`logs`: the folder for the output of workers in other processes."""
    if not config.has_workers:
        groups = in_this_process(config, layout)
        try:
            yield groups
        finally:
            groups.rollout.call("close")
        return
    for pool in layout.pools:
        for line in pool_lines(config, layout, pool):
            announce(line)
    with open_machines(config, layout) as machines:
        workers = start_workers(config, layout, machines, logs, Worker)
        source = spread_source(config)
        scorers = machines.start_scoring(queue_of, config, source) if source else ()
        yield build(config, layout, workers, scorers)


def start_workers(
    config: RunConfig, layout: WorkerLayout, machines: Machines, logs: Path | None, make: Callable[..., object]
) -> list[remote.RemoteWorker]:
    """One for each slot, with the object that `make` returns."""

    def start(slot: WorkerSlot) -> remote.RemoteWorker:
        file = None if logs is None else logs.absolute() / f"worker_{slot.number}.log"
        return machines.start(slot, f"worker {slot.number}", file, make, config, layout, slot)

    return [start(slot) for slot in layout.slots()]


def build(
    config: Config,
    layout: WorkerLayout,
    workers: Sequence[remote.RemoteWorker],
    scorers: Sequence[FutureQueue],
) -> WorkerGroups:
    all_workers, machines, work = build_models(config, layout, workers)

    def group(role: str, numbers: Iterable[int], workers_per_share: int = 1) -> remote.RemoteGroup:
        return remote.RemoteGroup([workers[number] for number in numbers], role, workers_per_share=workers_per_share)

    def trained(role: str, section: Actor | Critic) -> remote.RemoteGroup:
        numbers = layout.workers_of(role)
        return group(role, numbers, ranks_per_share(section, len(numbers)))

    actor, rollout = layout.workers_of(ACTOR), layout.workers_of(ROLLOUT)
    reward = layout.workers_of(REWARD) if has_reward_model(config) else ()
    section = config.actor_rollout_ref.actor
    return WorkerGroups(
        policy=trained(ACTOR, section),
        rollout=group(
            ROLLOUT,
            rollout[:1] if rollout_backend(config).one_client else rollout,
            config.actor_rollout_ref.rollout.workers_per_engine,
        ),
        weight_sync=group(WEIGHT_SYNC, sorted({*actor, *rollout})),
        files=group(FILES, actor if rollout_has_own_model(config) else rollout[:1]),
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
    config: RunConfig, layout: WorkerLayout, workers: Sequence[remote.RemoteWorker], stage: str = BUILD
) -> tuple[remote.RemoteGroup, list[Machine], dict[str, ModelWork]]:
    """All workers, their machines, and the work of the models that they have loaded, by role."""
    all_workers = remote.RemoteGroup(workers, role=None)
    machines: list[Machine] = all_workers.call("machine")
    inspect(machines, workers, config)
    addresses = all_workers.call("address")
    announce("Loading the models on the workers ...")
    rendezvous = Rendezvous({pool.name: addresses[pool.first] for pool in layout.pools})
    rendezvous[WEIGHT_SYNC] = remote.RemoteGroup(workers[:1], role=None).call("address")[0]
    work: dict[str, ModelWork] = {}
    with explain_out_of_memory(stage):
        for found in all_workers.call("build", rendezvous):
            work |= found
    return all_workers, machines, work


def total_peak_flops(machines: Sequence[Machine], layout: WorkerLayout) -> float | None:
    peaks = [peak for machine in machines if machine.gpu and (peak := peak_flops_by_name(machine.gpu)) is not None]
    return layout.gpus_per_worker * sum(peaks) if peaks and len(peaks) == len(machines) else None


def inspect(machines: Sequence[Machine], workers: Sequence[remote.RemoteWorker], config: RunConfig) -> None:
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
