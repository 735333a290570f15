"""The workers of a run and the group that holds each role.

Workers are in this process, in processes of this machine, actors of Ray, or the ranks that torchrun has started.
"""

import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rloom.config.base import RunConfig
from rloom.config.derived import ranks_per_share
from rloom.config.schema import Actor, Config, Critic
from rloom.console import announce
from rloom.engines.distributed import leave
from rloom.errors import WorkerError
from rloom.gpus import CHOICE, device_names
from rloom.launch.early_checks import layout_of
from rloom.launch.models import needs_critic
from rloom.launch.rewards import has_reward_model, queue_of, spread_source
from rloom.launch.worker import FILES, WEIGHT_SYNC, BaseWorker, Rendezvous, Worker
from rloom.rewards.score_queue import FutureQueue
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
from rloom.runtime.torchrun import RankGroup, TorchrunRanks, master_address, this_rank
from rloom.training.memory import BUILD, explain_out_of_memory

log = logging.getLogger(__name__)
CROWDED = 0.5  # less free memory than this share of a GPU: another process uses it
MakeWorker = Callable[..., BaseWorker[Any]]  # of the configuration, the layout and a slot
# of a role, the numbers of workers, how many of them hold one share, and the time limit of a call
MakeGroup = Callable[..., Group]


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
    scorers: Sequence[FutureQueue]  # rewards on other machines
    workers: "BuiltWorkers"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.files.call("stop_ids")[0]
        return found


def used_roles(config: Config, pool: Pool) -> list[str]:
    """The roles of a pool that this run has: actor, critic, rollout."""
    used = {
        REFERENCE: config.has_reference_model,
        CRITIC: needs_critic(config),
        REWARD: has_reward_model(config),
    }
    return [role for role in pool.roles if used.get(role, True)]


def start_lines(config: Config, layout: WorkerLayout) -> Iterator[str]:
    if config.has_workers:
        for pool in layout.pools:
            yield from pool_lines(config, layout, pool)
    else:
        yield f"Creating {', '.join(used_roles(config, layout.pools[0]))} in this process ..."


def pool_lines(config: Config, layout: WorkerLayout, pool: Pool) -> Iterator[str]:
    """Lines of the start: where each role of a pool is."""
    first, *others = used_roles(config, pool)
    yield f"Creating {first.capitalize()} worker pool: {pool.size} worker{'s' * (pool.size > 1)} ..."
    for role in others:
        where = named_workers(layout.placed[role]) if role in layout.placed else f"the workers of {first}"
        yield f"Creating {role.capitalize()} worker pool: {where} ..."


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
        self.started: list[processes.ForkedWorker] = []

    def start(
        self, slot: WorkerSlot, name: str, log_file: Path | None, make: Callable[..., Any], *arguments: Any
    ) -> remote.RemoteWorker:
        gpu = self.gpus[int(slot.number * self.layout.gpus_per_worker)] if self.gpus else ""
        worker = processes.ForkedWorker(name, log_file, {CHOICE: gpu}, make, arguments, timeout_s=self.timeout_s)
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


@dataclass(frozen=True)
class BuiltWorkers:
    """All workers of a run, with their models loaded."""

    group: MakeGroup
    all_workers: Group | None  # None: this process, or the ranks of torchrun
    work: Mapping[str, ModelWork]  # of the models, by role, where it is known
    device: torch.device  # of the loop itself
    devices: int  # of all workers
    peak_flops: float | None  # of all devices together, if known
    machines: Machines | None = None  # that started them


@contextmanager
def open_workers(
    config: RunConfig, layout: WorkerLayout, logs: Path | None, make: MakeWorker, stage: str = BUILD
) -> Iterator[BuiltWorkers]:
    """`logs`: the folder for the output of workers in other processes. `stage`: for a message about memory."""
    if config.has_workers:
        with open_machines(config, layout) as machines:
            yield build_models(config, layout, machines, logs, make, stage)
    elif config.workers > 1:
        with torchrun_ranks(config, layout, make, stage) as built:
            yield built
    else:
        [slot] = layout.slots()
        worker, work = build_here(config, layout, slot, Rendezvous(), make, stage)
        peak = device_peak_flops(worker.device)
        yield BuiltWorkers(
            lambda role, *_: LocalGroup([worker.roles[role]]), None, work, worker.device, layout.devices, peak
        )


def build_here(
    config: RunConfig, layout: WorkerLayout, slot: WorkerSlot, rendezvous: Rendezvous, make: MakeWorker, stage: str
) -> tuple[BaseWorker[Any], dict[str, ModelWork]]:
    worker = make(config, layout, slot)
    with explain_out_of_memory(stage):
        return worker, worker.build(rendezvous)


@contextmanager
def torchrun_ranks(config: RunConfig, layout: WorkerLayout, make: MakeWorker, stage: str) -> Iterator[BuiltWorkers]:
    """On rank 0 of torchrun; the others call `serve_rank`."""
    worker, work = build_rank(config, layout, make, stage)
    ranks = TorchrunRanks(worker)
    peak = device_peak_flops(worker.device)

    def group(role: str, numbers: Sequence[int], workers_per_share: int = 1, limit_s: float = math.inf) -> Group:
        return RankGroup(ranks, role, workers_per_share=workers_per_share)

    total = None if peak is None else peak * layout.workers
    yield BuiltWorkers(group, None, work, worker.device, layout.devices, total)
    ranks.stop()  # not after an error: torchrun ends the other ranks when this one has failed
    leave()


def serve_rank(config: RunConfig, make: MakeWorker, stage: str) -> int:
    """On the other ranks, which end when rank 0 does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 finishes its step first, and needs them for it
        signal.signal(number, signal.SIG_IGN)
    worker, _ = build_rank(config, layout_of(config), make, stage)
    TorchrunRanks(worker).serve()
    leave()
    return 0


def build_rank(
    config: RunConfig, layout: WorkerLayout, make: MakeWorker, stage: str
) -> tuple[BaseWorker[Any], dict[str, ModelWork]]:
    slot = layout.slots()[this_rank()]
    return build_here(config, layout, slot, Rendezvous({slot.pool.name: master_address()}), make, stage)


def build_models(
    config: RunConfig, layout: WorkerLayout, machines: Machines, logs: Path | None, make: MakeWorker, stage: str
) -> BuiltWorkers:
    """Start a worker for each slot, check its machine, and load its models."""

    def start(slot: WorkerSlot) -> remote.RemoteWorker:
        file = None if logs is None else logs.absolute() / f"worker_{slot.number}.log"
        return machines.start(slot, f"worker {slot.number}", file, make, config, layout, slot)

    def group(role: str, numbers: Sequence[int], workers_per_share: int = 1, limit_s: float = math.inf) -> Group:
        own = [workers[number] for number in numbers]
        return remote.RemoteGroup(own, role, workers_per_share=workers_per_share, limit_s=limit_s)

    def address(number: int) -> str:
        found: str = remote.RemoteGroup([workers[number]], role=None).call("address")[0]
        return found

    workers = [start(slot) for slot in layout.slots()]
    all_workers = remote.RemoteGroup(workers, role=None)
    found: list[Machine] = all_workers.call("machine")
    inspect(found, workers, config)
    announce("Loading the models on the workers ...")
    rendezvous = Rendezvous({pool.name: address(pool.first) for pool in layout.pools})
    rendezvous[WEIGHT_SYNC] = address(0)
    work: dict[str, ModelWork] = {}
    with explain_out_of_memory(stage):
        for own in all_workers.call("build", rendezvous):
            work |= own
    peak = total_peak_flops(found, layout)
    return BuiltWorkers(group, all_workers, work, torch.device("cpu"), layout.devices, peak, machines)


@contextmanager
def open_groups(config: Config, layout: WorkerLayout, logs: Path | None) -> Iterator[WorkerGroups]:
    """The groups of RL training."""
    for line in start_lines(config, layout):
        announce(line)
    with open_workers(config, layout, logs, Worker) as built:
        source, machines = spread_source(config), built.machines
        scorers = machines.start_scoring(queue_of, config, source) if source and machines is not None else ()
        groups = groups_of(config, layout, built, scorers)
        try:
            yield groups
        finally:
            if built.all_workers is None:  # workers in other processes are killed
                groups.rollout.call("close")


def groups_of(
    config: Config, layout: WorkerLayout, built: BuiltWorkers, scorers: Sequence[FutureQueue]
) -> WorkerGroups:
    def trained(role: str, section: Actor | Critic) -> Group:
        numbers = layout.workers_of(role)
        return built.group(role, numbers, ranks_per_share(section, len(numbers)))

    actor, rollout = layout.workers_of(ACTOR), layout.workers_of(ROLLOUT)
    reward = layout.workers_of(REWARD) if has_reward_model(config) else ()
    section = config.actor_rollout_ref.actor
    return WorkerGroups(
        policy=trained(ACTOR, section),
        rollout=built.group(
            ROLLOUT,
            rollout[:1] if config.actor_rollout_ref.rollout.uses_servers else rollout,
            config.actor_rollout_ref.rollout.workers_per_engine,
            config.actor_rollout_ref.rollout.progress_timeout_s,
        ),
        weight_sync=built.group(WEIGHT_SYNC, sorted({*actor, *rollout})),
        files=built.group(FILES, actor if config.actor_rollout_ref.rollout.kind.own_model else rollout[:1]),
        critic=trained(CRITIC, config.critic) if needs_critic(config) else None,
        reference=trained(REFERENCE, section) if config.has_reference_model else None,
        reward=[built.group(REWARD, [number]) for number in reward],
        scorers=scorers,
        workers=built,
    )


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
