"""Who does the work of a run: this process, or Ray workers. Nobody above can tell which."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.observe.metrics import device_peak_flops
from rloom.rewards.background import ScoreQueue
from rloom.runtime.group import Group, LocalGroup
from rloom.runtime.placement import ACTOR, CRITIC, REFERENCE, ROLLOUT, WorkerLayout, worker_layout
from rloom.trainer.assemble.models import has_reference_model, needs_critic
from rloom.trainer.assemble.worker import FILES, PUBLISH, Rendezvous, Worker
from rloom.trainer.memory import BUILD, explain_out_of_memory

# A switch for tests: the workers of a machine share its first GPU and communicate over gloo, which is slow.
SHARE_GPU = "RLOOM_TEST_SHARE_GPU"


@dataclass(frozen=True)
class WorkerGroups:
    """The groups of workers behind each role."""

    policy: Group
    rollout: Group
    publishers: Group  # all that take part when weights go from policy to rollout
    files: Group  # one worker, which has the policy whole
    critic: Group | None
    reference: Group | None
    all_workers: Group | None  # to ask how they are; None: they are this process
    parameters: Mapping[str, int]  # of the models, by role
    scorers: Sequence[ScoreQueue]  # of rewards, on machines other than this one
    device: torch.device  # of the loop itself
    peak_flops: float | None  # of all devices together, where it is known

    @property
    def stop_ids(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.files.each("stop_ids", [()])[0]
        return found


@contextmanager
def open_workers(config: Config, layout: WorkerLayout, logs: Path | None) -> Iterator[WorkerGroups]:
    """`logs`: the folder in which workers beyond this process leave what they say."""
    if not config.uses_ray:
        yield in_this_process(config, layout)
        return
    from rloom.trainer.assemble.ray_workers import ray_workers  # Ray is an extra

    with ray_workers(config, layout, logs) as groups:
        yield groups


def layout_of(config: Config) -> WorkerLayout:
    trainer = config.trainer
    share = os.environ.get(SHARE_GPU, "0")
    if share not in ("0", "1"):
        raise ConfigError(f"{SHARE_GPU}={share}: use 1 to put all workers of a machine on one GPU, or leave it out")
    gpus = 1 / trainer.n_gpus_per_node if share == "1" else 1.0
    return worker_layout(trainer.nnodes, trainer.n_gpus_per_node, trainer.pools.own, gpus_per_worker=gpus)


def in_this_process(config: Config, layout: WorkerLayout) -> WorkerGroups:
    [slot] = layout.slots()
    worker = Worker(config, layout, slot)
    with explain_out_of_memory(BUILD):
        parameters = worker.build(Rendezvous())

    def group(role: str) -> Group:
        return LocalGroup([worker.roles[role]])

    return WorkerGroups(
        policy=group(ACTOR),
        rollout=group(ROLLOUT),
        publishers=group(PUBLISH),
        files=group(FILES),
        critic=group(CRITIC) if needs_critic(config) else None,
        reference=group(REFERENCE) if has_reference_model(config) else None,
        all_workers=None,
        parameters=parameters,
        scorers=(),
        device=worker.device,
        peak_flops=device_peak_flops(worker.device),
    )
