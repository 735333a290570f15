"""A run of RL training: what it reads and builds, its first line and its summary. `job.py` has the rest."""

import logging
import math
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rloom.config.checks import check, late_notices, notices_on_a_cpu
from rloom.config.derived import turns_text
from rloom.config.schema import Config
from rloom.launch.build import (
    PolicyParts,
    check_own_algorithm,
    open_parts,
    prepare,
    resolved_needs,
)
from rloom.launch.identity import Continuation, Record, check_replay, compare, describe
from rloom.launch.inputs import Inputs, RunData
from rloom.launch.job import (
    Outcome,
    continue_from,
    live_diagnosis,
    run_with_restarts,
    timetable,
    train_to_end,
)
from rloom.launch.models import needs_critic
from rloom.runs.curve import draw_learning_curve
from rloom.runs.dumps.index import FOLDER
from rloom.runs.dumps.limits import limit_bytes
from rloom.runs.dumps.writer import DumpWriter
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog
from rloom.runs.summary import summary_lines
from rloom.runtime.placement import WorkerLayout
from rloom.training.checkpoint import Checkpoints
from rloom.training.loop import Training
from rloom.training.steps import AfterStep, always_continue

logger = logging.getLogger(__name__)
CURVE = "learning_curve.png"
NO_REFERENCE = "no reference (algorithm.kl_metric=True measures the KL to it)"


@dataclass(frozen=True)
class Caller:
    """What a run gets beside the configuration."""

    data: RunData
    after_step: AfterStep = always_continue


def run(config: Config, caller: Caller) -> Outcome:
    check_own_algorithm(config)
    for notice in cpu_notices(config):
        logger.warning(f"Note: {notice}")
    return run_with_restarts(PolicyTraining(config, caller))


def cpu_notices(config: Config) -> list[str]:
    if config.trainer.device != "auto" or config.has_workers or torch.cuda.is_available():
        return []
    return notices_on_a_cpu(config, resolved_needs(config))


@dataclass(frozen=True)
class PolicyTraining:
    """RL training as a job."""

    config: Config
    caller: Caller

    @property
    def keep(self) -> dict[str, int | None]:
        trainer = self.config.trainer
        critic = {"critic": trainer.max_critic_ckpt_to_keep} if needs_critic(self.config) else {}
        return {"actor": trainer.max_actor_ckpt_to_keep, **critic}

    @property
    def only_reads(self) -> bool:
        return self.config.trainer.val_only

    @property
    def notices(self) -> list[str]:
        return [*check(self.config, resolved_needs(self.config)), *cpu_notices(self.config)]

    def prepare(self) -> Inputs:
        return prepare(self.config, self.caller.data)

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        return describe(self.config, inputs)

    def compare(self, start: Path, identity: Record) -> Continuation:
        trainer = self.config.trainer
        chosen = trainer.resume_mode == "resume_path" or trainer.val_only
        return compare(start, self.config, identity, chosen=chosen)

    def open(
        self, layout: WorkerLayout, inputs: Inputs, identity: Record, logs: Path
    ) -> AbstractContextManager[PolicyParts]:
        check_replay(self.config, identity)
        return open_parts(self.config, layout, inputs, identity, logs)

    def train(
        self, parts: PolicyParts, log: RunLog, checkpoints: Checkpoints, start: Path | None, how: Continuation | None
    ) -> Outcome:
        config = self.config
        with ExitStack() as stack:
            dumps = dump_writer(config, parts, log)
            if dumps is not None:
                stack.enter_context(closing(dumps))
            training = Training(
                parts.settings,
                parts.roles,
                parts.stream,
                parts.kl,
                log,
                checkpoints,
                parts.write_checkpoint,
                parts.load_checkpoint,
                self.caller.after_step,
                live_diagnosis(config, log.run_dir),
                dumps,
            )
            continue_from(training, log, start, how)
            if config.trainer.val_only:
                training.validate(training.state.step)
                return Outcome(checkpoints.directory, start)
            if start is not None:
                remove_dumps_after(training.state.step, dumps, log.run_dir)
            for notice in late_notices(config, parts.settings.total_steps):
                logger.warning(f"Note: {notice}")
            return train_to_end(
                training,
                log,
                start,
                opening=first_lines(config, parts),
                summary=lambda: summary(log, checkpoints),
            )


def remove_dumps_after(step: int, dumps: DumpWriter | None, run_dir: Path) -> None:
    """Also if this run writes none: those of the replaced steps would be shown as its own."""
    if dumps is not None:
        dumps.remove_after(step)
        return
    with closing(DumpWriter(run_dir / FOLDER, limit=math.inf, seed=0, report=logger.warning)) as former:
        former.remove_after(step)


def dump_writer(config: Config, parts: PolicyParts, log: RunLog) -> DumpWriter | None:
    trainer = config.trainer
    if not trainer.log_rollouts or trainer.val_only:
        return None
    return DumpWriter(
        log.run_dir / FOLDER,
        limit=limit_bytes(trainer.log_rollouts_gb),
        seed=config.data.seed,
        report=lambda message: log.warning(message, kind="rollouts"),
        save_tokenizer=parts.save_tokenizer,
    )


def first_lines(config: Config, parts: PolicyParts) -> str:
    n, steps, prompts = config.actor_rollout_ref.rollout.n, parts.settings.total_steps, len(parts.stream)
    opening = (
        f"{config.algorithm.adv_estimator} on {config.model_path} ({parts.settings.device}): {prompts} "
        f"prompt{'s' if prompts != 1 else ''}, "
        f"{config.data.train_batch_size} × {n} answers a step, "
        f"{'at most ' if config.ends_with_the_data else ''}{steps} step{'s' if steps != 1 else ''}, "
        f"{use_of_reference(config)}\n"
        f"{timetable(parts.settings, parts.stream.steps_per_epoch, validates=parts.roles.evaluator is not None)}"
    )
    turns = turns_text(config)
    return opening if turns is None else f"{opening}\nSeveral turns with {turns}"


def use_of_reference(config: Config) -> str:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    places = [f"in the reward ({algorithm.kl_penalty} × {algorithm.kl_ctrl.kl_coef})"] if config.kl_in_reward else []
    places += [f"in the loss ({actor.kl_loss_type} × {actor.kl_loss_coef})"] if actor.use_kl_loss else []
    places += ["measured, without a penalty"] if config.kl_only_measured else []
    return f"KL to the reference {' and '.join(places)}" if places else NO_REFERENCE


def summary(log: RunLog, checkpoints: Checkpoints) -> list[str]:
    newest = from_here(checkpoints.path(checkpoints.steps()[-1]))  # the last step is always saved
    return [
        *summary_lines(RunFolder(log.run_dir)),
        f"Learning curve: {from_here(draw_learning_curve(log.metrics_file, log.run_dir / CURVE))}",
        f"In the browser: rloom view {from_here(log.run_dir)}",
        f"Model: {newest}; as a Hugging Face folder: rloom export {newest} DIR",
        f"Talk to it: rloom chat {newest}",
    ]


def from_here(path: Path) -> Path:
    """Relative to the current folder where it is below it: a command with it fits on a line."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
