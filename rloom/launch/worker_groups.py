"""The worker groups of a run, and how they are made in this process. ray_workers.py makes them of Ray actors."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rloom.config.base import RunConfig
from rloom.config.schema import Config
from rloom.console import announce
from rloom.errors import ConfigError
from rloom.launch.models import has_reference_model, needs_critic
from rloom.launch.reward_model import has_reward_model
from rloom.launch.worker import FILES, WEIGHT_SYNC, Rendezvous, Worker
from rloom.rewards.score_queue import FutureQueue
from rloom.runs.metrics import ModelWork, device_peak_flops
from rloom.runtime.group import Group, LocalGroup
from rloom.runtime.placement import (
    ACTOR,
    CRITIC,
    REFERENCE,
    REWARD,
    ROLLOUT,
    Pool,
    WorkerLayout,
    named_workers,
)
from rloom.training.memory import BUILD, explain_out_of_memory

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
