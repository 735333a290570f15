"""The engine role: one worker's part of a model that is scored and trained."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Metrics, Objective
from rloom.batch import Batch, TrainBatch


@dataclass(frozen=True)
class Placement:
    device: torch.device
    dtype: torch.dtype = torch.float32  # of the arithmetic; what the optimizer updates is float32
    offload_parameters: bool = False
    offload_optimizer: bool = False


@dataclass(frozen=True)
class AdamW:
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float


@dataclass(frozen=True)
class Update:
    """What became of a gradient. One that is not finite is dropped, never applied."""

    grad_norm: float
    applied: bool
    metrics: Metrics = field(default_factory=dict)  # this worker's shares of what the objective says of the lesson


class Engine(Protocol):
    def score(self, batch: Batch) -> Tensor:
        """output_T, on the CPU: log-probs of a policy, values of a critic."""

    def score_reference(self, batch: Batch) -> Tensor:
        """The same with the LoRA adapter switched off."""

    def forward_backward(self, batch: TrainBatch, objective: Objective, counts: Counts) -> None:
        """Add this batch's share of the mini-batch's gradient. It need not have ended when this returns."""

    def optim_step(self, learning_rate: float) -> Update:
        """Apply the gathered gradient and forget it. The one moment of an update at which the device is waited for."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, whole, one at a time, as the arithmetic sees it: what a rollout engine loads."""

    def save(self, folder: Path, contents: frozenset[str]) -> None: ...

    def load(self, folder: Path, contents: frozenset[str]) -> None: ...
