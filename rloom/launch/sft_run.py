"""A run of supervised fine-tuning: what it reads and builds, its first line and its summary."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.config.sft_schema import SftConfig
from rloom.data.examples import Example
from rloom.launch.identity import (
    SHAPES,
    VERSION,
    Continuation,
    Difference,
    Record,
    continuation,
    data_differences,
    lora_record,
    model_differences,
    read_record,
)
from rloom.launch.job import Outcome, continue_from, live_diagnosis, run_job, run_to_end, timetable
from rloom.launch.model_sources import sft_source
from rloom.launch.run import CURVE
from rloom.launch.sft import SftInputs, SftParts, SftWorker, open_sft, prepare_sft
from rloom.launch.workers import serve_rank
from rloom.models.fingerprint import fingerprint, tokenizer_digest
from rloom.runs.curve import draw_learning_curve
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog
from rloom.runtime.placement import WorkerLayout
from rloom.training.checkpoint import Checkpoints
from rloom.training.memory import SFT_BUILD
from rloom.training.sft import SftTraining

KIND = "sft"  # in the record of a run


def run(config: SftConfig) -> Outcome:
    return run_job(SupervisedTraining(config))


def serve(config: SftConfig) -> int:
    """On the ranks of torchrun other than 0."""
    return serve_rank(config, SftWorker, SFT_BUILD)


@dataclass(frozen=True)
class SupervisedTraining:
    """Supervised fine-tuning as a job."""

    config: SftConfig
    only_reads: bool = False

    @property
    def keep(self) -> dict[str, int | None]:
        return {"actor": self.config.trainer.max_ckpt_to_keep}

    def prepare(self) -> SftInputs:
        return prepare_sft(self.config)

    def identity(self, inputs: SftInputs) -> Record:
        return describe_sft(self.config, inputs)

    def compare(self, start: Path, identity: Record) -> Continuation:
        return compare_sft(start, self.config, identity)

    def open(
        self, layout: WorkerLayout, inputs: SftInputs, identity: Record, logs: Path
    ) -> AbstractContextManager[SftParts]:
        return open_sft(self.config, layout, inputs, identity, logs)

    def train(
        self, parts: SftParts, log: RunLog, checkpoints: Checkpoints, start: Path | None, how: Continuation | None
    ) -> Outcome:
        training = SftTraining(
            parts.settings,
            parts.model,
            parts.stream,
            parts.held_out,
            parts.workers,
            log,
            checkpoints,
            parts.write_checkpoint,
            parts.load_checkpoint,
            live_diagnosis(self.config),
        )
        continue_from(training, log, start, how)
        return run_to_end(
            training,
            log,
            start,
            opening=opening(self.config, parts),
            summary=lambda: summary(log, checkpoints),
        )


def opening(config: SftConfig, parts: SftParts) -> str:
    tuned = f"a LoRA adapter of rank {config.model.lora_rank}" if config.model.has_lora else "all weights"
    steps = parts.settings.total_steps
    return (
        f"sft on {config.model.path} ({parts.settings.device}): {len(parts.stream)} rows, "
        f"{config.data.train_batch_size} a step, {steps} step{'s' if steps != 1 else ''}, {tuned}\n"
        f"{timetable(parts.settings, parts.stream.steps_per_epoch, validates=bool(parts.held_out))}"
    )


def summary(log: RunLog, checkpoints: Checkpoints) -> str:
    lines = loss_lines(RunFolder(log.run_dir).metrics)
    picture = draw_learning_curve(log.metrics_file, log.run_dir / CURVE)
    newest = checkpoints.path(checkpoints.steps()[-1])  # the last step is always saved
    return "\n".join(
        [
            *lines,
            f"Learning curve: {picture}",
            f"Model: {newest}; as a Hugging Face folder: rloom export {newest} DIR, which RL training starts from with "
            "actor_rollout_ref.model.path=DIR",
        ]
    )


def loss_lines(records: Sequence[Mapping[str, float]]) -> list[str]:
    """The first validation and the last, each with its step."""
    found = [(int(record["step"]), record["val/loss"]) for record in records if "val/loss" in record]
    if not found:
        return []
    (first_step, first), (last_step, last) = found[0], found[-1]
    now = f", {last:.3f} now" if last_step > first_step else ""
    return [f"Validation loss: {first:.3f} {'at the start' if first_step == 0 else f'after step {first_step}'}{now}"]


def describe_sft(config: SftConfig, inputs: SftInputs) -> dict[str, Any]:
    return {
        "version": VERSION,
        "kind": KIND,
        "model": fingerprint(sft_source(config)).record(),
        "tokenizer": tokenizer_digest(inputs.tokenizer),
        "lora": lora_record(config.model),
        "data": rows_record(inputs.rows),
        "held_out": rows_record(inputs.held_out),
        "shuffle": config.data.shuffle,
        "seed": config.data.seed,
    }


def rows_record(rows: Sequence[Example]) -> dict[str, Any]:
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps([row.index, row.text]).encode())
    return {"rows": len(rows), "content": found.hexdigest()}


def compare_sft(checkpoint: Path, config: SftConfig, own: Record) -> Continuation:
    """How this run goes on from a checkpoint; an error where that would be another run under the same name."""
    strict = config.trainer.resume_mode != "resume_path"
    found = list(differences(read_record(checkpoint, SHAPES, KIND), own, strict))
    return continuation(checkpoint, config, found)


def differences(saved: Record, own: Record, strict: bool) -> Iterator[Difference]:
    yield from model_differences(saved, own, strict, "model.path")
    yield from data_differences(saved, own, strict)
    if saved["held_out"] != own["held_out"]:
        yield Difference("the validation data is another: losses before and after do not compare", refused=False)
