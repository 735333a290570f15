"""The loop of supervised fine-tuning: `SftTraining.train_step` is one step, one optimizer step on one batch of rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rloom.batch import TrainBatch
from rloom.data.examples import Example
from rloom.data.stream import RowStream
from rloom.doctor.run.live import LiveDiagnosis
from rloom.runs.metrics import throughput, utilisation
from rloom.runs.runlog import RunLog
from rloom.runtime.group import Group
from rloom.training.checkpoint import Checkpoints, read_state
from rloom.training.memory import SFT_UPDATE, SFT_VALIDATION, explain_out_of_memory
from rloom.training.roles import Learner
from rloom.training.steps import CompletedStep, StepLoop, StepSettings, WriteCheckpoint, worker_metrics


@dataclass(frozen=True, kw_only=True)
class SftSettings(StepSettings):
    rows_per_validation_pass: int


@dataclass(frozen=True)
class SftState:
    step: int
    stream: dict[str, Any]  # position in the data


class SftTraining(StepLoop):
    settings: SftSettings
    state: SftState

    def __init__(
        self,
        settings: SftSettings,
        model: Learner,
        stream: RowStream[Example],
        held_out: Sequence[Example],
        workers: Group | None,  # all of them, iff they are other processes
        log: RunLog,
        checkpoints: Checkpoints,
        write_checkpoint: WriteCheckpoint,
        load_checkpoint: Callable[[Path], None],
        diagnosis: LiveDiagnosis | None = None,
    ) -> None:
        super().__init__(settings, SftState(0, stream.state()), log, checkpoints, write_checkpoint, diagnosis=diagnosis)
        self.model, self.stream, self.held_out, self.workers = model, stream, held_out, workers
        self.load_checkpoint = load_checkpoint

    @property
    def updates(self) -> int:
        return self.model.updates

    def train_step(self, step: int) -> CompletedStep:
        log = self.log
        with log.span("step"):
            batch = pack(self.stream.next())
            with self.stage(SFT_UPDATE):
                metrics = self.model.learn(batch, step, log.advance)
        self.state, self.updates_at_state = SftState(step, self.stream.state()), self.updates
        tokens, seconds = len(batch.tokens_T), log.seconds("step")
        s = self.settings
        metrics |= throughput(tokens=tokens, seconds=seconds, device=s.device, devices=s.devices)
        if self.model.work is not None:
            flops = float(self.model.work.update_flops(batch.length_N).sum())
            metrics |= utilisation("actor", flops=flops, seconds=seconds, peak_flops=s.peak_flops)
        if self.workers is not None:
            metrics |= worker_metrics(self.workers)
        metrics |= {"train/answer_tokens": float(batch.mask_T.sum()), "train/tokens_per_s": tokens / max(seconds, 1e-9)}
        logged = log.step(step, metrics | {"training/global_step": step, "training/epoch": self.stream.epoch})
        return CompletedStep(logged)

    def validate(self, step: int) -> dict[str, float]:
        """The mean loss of an answer token, over all of them, and its exponential."""
        if not self.held_out:
            return {}
        size, loss, tokens = self.settings.rows_per_validation_pass, 0.0, 0
        with self.log.span("testing"), explain_out_of_memory(SFT_VALIDATION), self.can_stop():
            for first in range(0, len(self.held_out), size):
                batch = pack(self.held_out[first : first + size])
                logprobs_T = self.model.scorer.score(batch)
                loss -= float(logprobs_T[batch.mask_T].double().sum())
                tokens += int(batch.mask_T.sum())
                self.log.advance(min(first + size, len(self.held_out)), len(self.held_out))
        metrics = {"val/loss": loss / tokens, "val/perplexity": perplexity(loss / tokens)}
        self.log.validation(step, metrics, measures={})
        return metrics

    def saved_state(self) -> dict[str, Any]:
        return {"step": self.state.step, "stream": self.state.stream}

    def resume(self, checkpoint: Path, *, keep_position: bool = True) -> None:
        saved = read_state(checkpoint)
        self.load_checkpoint(checkpoint)
        if keep_position:
            self.stream.load(saved["stream"])
        self.state = SftState(saved["step"], self.stream.state())


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # larger ones overflow


def pack(examples: Sequence[Example]) -> TrainBatch:
    """Supervised fine-tuning is a policy gradient on given answers, each token with an advantage of 1."""
    tokens_T = torch.tensor([token for example in examples for token in example.tokens])
    mask_T = torch.tensor([answer for example in examples for answer in example.mask])
    count = len(examples)
    return TrainBatch(
        tokens_T=tokens_T,
        mask_T=mask_T,
        rollout_logprobs_T=torch.zeros(len(tokens_T)),
        length_N=torch.tensor([len(example.tokens) for example in examples]),
        group_N=torch.arange(count),
        score_N=torch.ones(count),
        valid_N=torch.ones(count, dtype=torch.bool),
        advantages_T=mask_T.float(),
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )
