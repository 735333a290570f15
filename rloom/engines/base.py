"""The engine protocol: one worker's part of a model that is scored and trained."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Metrics, Objective
from rloom.batch import Batch, TokenOutputs, TrainBatch
from rloom.models.network import Reference


@dataclass(frozen=True)
class Placement:
    device: torch.device
    dtype: torch.dtype = torch.float32  # for the forward and backward pass; the optimizer updates float32 masters
    offload_parameters: bool = False
    offload_optimizer: bool = False

    @property
    def storage_device(self) -> torch.device:
        """Where the parameters are between passes."""
        return torch.device("cpu") if self.offload_parameters else self.device

    @property
    def description(self) -> str:
        offloaded = {"parameters": self.offload_parameters, "optimizer": self.offload_optimizer}
        names = " and ".join(name for name, on in offloaded.items() if on)
        return f"{dtype_name(self.dtype)} on {self.device}" + (f", {names} offloaded" if names else "")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class AdamW:
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float


@dataclass(frozen=True)
class Update:
    """The result of an optimizer step. A gradient that is not finite is dropped, never applied."""

    grad_norm: float
    applied: bool
    metrics: Metrics = field(default_factory=dict)  # this worker's summands of the mini-batch's metrics
    outputs: TokenOutputs | None = None  # iff the objective records them: of this worker's samples, on the host


class TensorSpec(NamedTuple):
    name: str
    shape: list[int]
    dtype: str  # torch's name without `torch.`


class Engine(Protocol):
    @property
    def size(self) -> int:
        """Parameters of the whole model."""

    @property
    def device(self) -> torch.device: ...

    @property
    def description(self) -> str:
        """How the model is held, for the log: `FSDP2 over 2 ranks, bfloat16 on cuda:0`."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Holds offloaded parameters on the device while it is open."""

    def as_reference(self) -> AbstractContextManager[Reference]:
        """The model without its adapter, ready to be compared with another while it is open."""

    def score(self, batch: Batch) -> Tensor:
        """output_T, on the CPU: log-probs of a policy, values of a critic."""

    def score_reference(self, batch: Batch) -> Tensor:
        """The outputs of `score` with the LoRA adapter switched off."""

    def forward_backward(self, batch: TrainBatch, objective: Objective, counts: Counts) -> None:
        """Add this batch's share of the mini-batch's gradient. The device may still be working when it returns."""

    def optim_step(self, learning_rate: float) -> Update:
        """Apply the accumulated gradient and clear it. The only call of an update that waits for the device."""

    def weights(self, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter by name, whole, one at a time, in the dtype of the forward pass.

        A rollout engine loads them. `frozen`: what never changes, too, which a copy that was created empty gets once:
        frozen parameters and buffers.
        """

    def manifest(self, frozen: bool = False) -> list[TensorSpec]:
        """The tensors that `weights` yields, in order, without gathering them."""

    def fingerprints(self, frozen: bool = False) -> Tensor:
        """A row of two sums for each tensor of `manifest`: see engines/fingerprint.py. All ranks call it together,
        after `weights`. Computed from the parameters themselves, unless ranks hold parts of rows."""

    def save(self, folder: Path, contents: frozenset[str], background: bool = False) -> list[Path]:
        """Returns the files that all ranks write together, each of which gets a report (hashed_files.py).

        In the background it returns as soon as what is saved was copied to host memory, and a thread writes the copy.
        The next save begins after `check_save(True)`.
        """

    def check_save(self, wait: bool) -> None:
        """Raise what stopped a save in the background. `wait`: until it has ended."""

    def load(self, folder: Path, contents: frozenset[str]) -> None: ...
