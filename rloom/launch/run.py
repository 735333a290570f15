"""A run of RL training: what it reads and builds, its first line and its summary. `job.py` has the rest."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rloom.config.checks import late_notices, notices_on_a_cpu
from rloom.config.derived import ACCURACY, validation_word
from rloom.config.schema import Config
from rloom.launch.build import (
    PolicyParts,
    check_own_algorithm,
    open_parts,
    prepare,
    resolved_needs,
)
from rloom.launch.identity import Continuation, Record, compare, describe
from rloom.launch.inputs import Inputs, UserObjects
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
from rloom.runs.display import validation_accuracies
from rloom.runs.dumps.index import FOLDER, limit_bytes
from rloom.runs.dumps.writer import DumpWriter
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog
from rloom.runtime.placement import WorkerLayout
from rloom.training.checkpoint import Checkpoints
from rloom.training.loop import Training
from rloom.training.steps import AfterStep, always_continue

logger = logging.getLogger(__name__)
CURVE = "learning_curve.png"
NO_REFERENCE = "no reference (algorithm.kl_metric=True measures the KL to it)"


@dataclass(frozen=True)
class Caller:
    """What a program gives beside the configuration."""

    objects: UserObjects
    after_step: AfterStep = always_continue


COMMAND = Caller(UserObjects())  # a command gives the configuration alone


def run(config: Config, caller: Caller = COMMAND) -> Outcome:
    check_own_algorithm(config)
    trainer = config.trainer
    if trainer.device == "auto" and not config.has_workers and not torch.cuda.is_available():
        for notice in notices_on_a_cpu(config, resolved_needs(config)):
            logger.warning(f"Note: {notice}")
    return run_with_restarts(PolicyTraining(config, caller))


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

    def prepare(self) -> Inputs:
        return prepare(self.config, self.caller.objects)

    def identity(self, inputs: Inputs) -> dict[str, Any]:
        return describe(self.config, inputs)

    def compare(self, start: Path, identity: Record) -> Continuation:
        trainer = self.config.trainer
        chosen = trainer.resume_mode == "resume_path" or trainer.val_only
        return compare(start, self.config, identity, chosen=chosen)

    def open(
        self, layout: WorkerLayout, inputs: Inputs, identity: Record, logs: Path
    ) -> AbstractContextManager[PolicyParts]:
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
                opening=opening(config, parts),
                summary=lambda: summary(config, log, checkpoints),
            )


def remove_dumps_after(step: int, dumps: DumpWriter | None, run_dir: Path) -> None:
    """Also if this run writes none: those of the replaced steps would be shown as its own."""
    if dumps is not None:
        dumps.remove_after(step)
        return
    with closing(DumpWriter(run_dir / FOLDER, limit=math.inf, report=logger.warning)) as former:
        former.remove_after(step)


def dump_writer(config: Config, parts: PolicyParts, log: RunLog) -> DumpWriter | None:
    trainer = config.trainer
    if not trainer.log_rollouts or trainer.val_only:
        return None
    return DumpWriter(
        log.run_dir / FOLDER,
        limit=limit_bytes(trainer.log_rollouts_gb),
        report=lambda message: log.warning(message, kind="rollouts"),
        save_tokenizer=parts.save_tokenizer,
    )


def opening(config: Config, parts: PolicyParts) -> str:
    n, steps, prompts = config.actor_rollout_ref.rollout.n, parts.settings.total_steps, len(parts.stream)
    return (
        f"{config.algorithm.adv_estimator} on {config.model_path} ({parts.settings.device}): {prompts} "
        f"prompt{'s' if prompts != 1 else ''}, "
        f"{config.data.train_batch_size} × {n} answers a step, "
        f"{'at most ' if config.ends_with_the_data else ''}{steps} step{'s' if steps != 1 else ''}, "
        f"{use_of_reference(config)}\n"
        f"{timetable(parts.settings, parts.stream.steps_per_epoch, validates=parts.roles.evaluator is not None)}"
    )


def use_of_reference(config: Config) -> str:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    places = [f"in the reward ({algorithm.kl_penalty} × {algorithm.kl_ctrl.kl_coef})"] if config.kl_in_reward else []
    places += [f"in the loss ({actor.kl_loss_type} × {actor.kl_loss_coef})"] if actor.use_kl_loss else []
    places += ["measured, without a penalty"] if config.kl_only_measured else []
    return f"KL to the reference {' and '.join(places)}" if places else NO_REFERENCE


def summary(config: Config, log: RunLog, checkpoints: Checkpoints) -> str:
    lines = validation_lines(RunFolder(log.run_dir).metrics, validation_word(config))
    picture = draw_learning_curve(log.metrics_file, log.run_dir / CURVE)
    lines.append(f"Learning curve: {picture}")
    lines.append(f"In the browser: rloom view {log.run_dir}")
    newest = checkpoints.path(checkpoints.steps()[-1])  # the last step is always saved
    lines.append(f"Model: {newest}; as a Hugging Face folder: rloom export {newest} DIR")
    return "\n".join(lines)


def validation_lines(records: Sequence[Mapping[str, float]], word: str) -> list[str]:
    """The first validation and the last, each with its step: there need not have been one before the first step."""
    found = [(int(record["step"]), values) for record in records if (values := validation_accuracies(record))]
    if not found:
        return []
    lines = []
    last_step, last = found[-1]
    for source, accuracy in last.items():
        step, first = next((step, values[source]) for step, values in found if source in values)
        when = "at the start" if step == 0 else f"after step {step}"
        now = f", {shown(accuracy, word)} now" if step < last_step else ""
        lines.append(f"Held-out {word} on {source}: {shown(first, word)} {when}{now}")
    return lines


def shown(value: float, word: str) -> str:
    """An accuracy as a percentage, unless the scores of a function are not within 0 and 1."""
    return f"{value:.1%}" if word == ACCURACY and 0 <= value <= 1 else f"{value:.3g}"
