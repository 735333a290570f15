"""The disk of a run: its checkpoints, and the answers that it writes for `rloom view`."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rloom.config.base import RunTrainer
from rloom.config.schema import Config, SftConfig
from rloom.models.source import ModelSource
from rloom.plan.architecture import FLOAT32, adapter_parameters, critic_model, policy_model, read_architecture
from rloom.runs.dumps.limits import TOKEN_BYTES, limit_bytes, tokens_of_a_step

GIB, MIB = 1024**3, 1024**2
CONTENTS = {"model": 1, "optimizer": 2, "hf_model": 1}  # float32 numbers of a parameter: weights; two moments


@dataclass(frozen=True)
class SavedRole:
    """The folder of the actor or the critic in a checkpoint."""

    bytes: float
    kept: int | None  # newest checkpoints that keep it. None: all

    def together(self, saves: int) -> float:
        """Of so many checkpoints. A new one is complete before the oldest is removed."""
        return self.bytes * (saves if self.kept is None else min(saves, self.kept + 1))


@dataclass(frozen=True)
class DiskPlan:
    folder: Path  # the run directory
    free_bytes: float | None  # None: the file system does not tell
    roles: Mapping[str, SavedRole]
    saves: int | None  # checkpoints that the run will write. None: its length is not known
    answer_bytes: float  # `rollouts/` at most
    copied_bytes: float = 0  # memory of each machine's host from the first save on; 0: steps wait until it is written

    @property
    def checkpoint_bytes(self) -> float:
        return sum(role.bytes for role in self.roles.values())

    @property
    def all_bytes(self) -> float:
        """Everything that the run writes; with one checkpoint, if their number is not known."""
        return sum(role.together(self.saves or 1) for role in self.roles.values()) + self.answer_bytes

    @property
    def holds_no_checkpoint(self) -> bool:
        return self.free_bytes is not None and self.checkpoint_bytes > self.free_bytes

    @property
    def holds_not_all(self) -> bool:
        return self.free_bytes is not None and self.all_bytes > self.free_bytes


def disk_plan(config: Config, folder: Path, steps: int | None, *, critic: bool, saved: int = 0) -> DiskPlan:
    """`steps`: of the whole run. `saved`: checkpoints of it that are there. UnknownSize: of an unknown model."""
    trainer, model = config.trainer, config.actor_rollout_ref.model
    contents = config.actor_rollout_ref.actor.checkpoint.save_contents
    size = read_architecture(policy_model(config))
    adapter = adapter_parameters(model, size)
    actor_bytes = role_bytes(contents, adapter or size.parameters, size.parameters + adapter)
    roles = {"actor": SavedRole(actor_bytes, trainer.max_actor_ckpt_to_keep)}
    if critic:
        trained = read_architecture(critic_model(config)).critic_parameters
        without_export = [name for name in contents if name != "hf_model"]
        roles["critic"] = SavedRole(role_bytes(without_export, trained, 0), trainer.max_critic_ckpt_to_keep)
    whole = role_bytes([name for name in contents if name == "hf_model"], 0, size.parameters + adapter)
    saves_beside = config.actor_rollout_ref.actor.checkpoint.async_save
    copied = sum(role.bytes for role in roles.values()) - whole if saves_beside else 0
    written, answers = saves(trainer, steps, saved), answer_bytes(config, steps)
    return DiskPlan(folder, free_bytes(folder), roles, written, answers, copied / trainer.nnodes)


def sft_disk_plan(config: SftConfig, folder: Path, steps: int | None, *, saved: int = 0) -> DiskPlan:
    model, trainer = config.model, config.trainer
    size = read_architecture(ModelSource(model.path, "model.path", overrides=model.override_config))
    adapter = adapter_parameters(model, size, "model")
    written = role_bytes(trainer.checkpoint.save_contents, adapter or size.parameters, size.parameters + adapter)
    roles = {"actor": SavedRole(written, trainer.max_ckpt_to_keep)}
    return DiskPlan(folder, free_bytes(folder), roles, saves(trainer, steps, saved), 0)


def role_bytes(contents: Sequence[str], trained: int, whole: int) -> float:
    numbers = {name: whole if name == "hf_model" else trained for name in CONTENTS}
    return sum(FLOAT32 * CONTENTS[name] * numbers[name] for name in CONTENTS if name in contents)


def saves(trainer: RunTrainer, steps: int | None, saved: int) -> int | None:
    """Every `save_freq` steps, and the last."""
    if trainer.save_freq < 1:
        return 1
    return None if steps is None else max(1, -(-steps // trainer.save_freq) - saved)


def answer_bytes(config: Config, steps: int | None) -> float:
    written = TOKEN_BYTES * answer_tokens(config) * dumped_share(config) * (steps or 1)
    return min(written, limit_bytes(config.trainer.log_rollouts_gb))


def answer_tokens(config: Config) -> int:
    """Of a step, at most."""
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n * config.data.longest_answer


def dumped_share(config: Config) -> float:
    """Of a step's answers, at their largest length."""
    if not config.trainer.log_rollouts:
        return 0.0
    return min(1.0, tokens_of_a_step(limit_bytes(config.trainer.log_rollouts_gb)) / answer_tokens(config))


def free_bytes(folder: Path) -> float | None:
    """For this user, on the disk that will hold the folder."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    usage = shutil.disk_usage(existing)
    return usage.free if usage.total else None  # some network file systems report 0 of 0


def size_text(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"


def roles_text(plan: DiskPlan) -> str:
    """`5.5 GiB (actor 2.8 GiB, critic 2.7 GiB)`"""
    parts = ", ".join(f"{name} {size_text(role.bytes)}" for name, role in plan.roles.items())
    return size_text(plan.checkpoint_bytes) + (f" ({parts})" if len(plan.roles) > 1 else "")
