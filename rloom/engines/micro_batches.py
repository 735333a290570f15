"""Run a batch as micro-batches: split it, run a pass for each, and restore the order of the samples."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Metrics, Objective, Shares
from rloom.batch import Batch, TokenOutputs, TrainBatch, token_indices
from rloom.models.network import LossFn
from rloom.packing import MicroBatching

B = TypeVar("B", bound=Batch)


class ForwardFn(Protocol):
    """The model's outputs for one micro-batch, which is given on the host and on the device."""

    def __call__(self, host_batch: Batch, device_batch: Batch) -> TokenOutputs: ...


class MicroBatchLoss(Protocol):
    """The loss of one micro-batch, differentiable: the sum of `loss_fn` over its ranges of samples."""

    def __call__(self, host_batch: Batch, device_batch: Batch, loss_fn: LossFn) -> Tensor: ...


@dataclass(frozen=True)
class MicroBatches(Generic[B]):
    """A batch, reordered so that each micro-batch is a slice of it, on the host and on the device.

    The whole batch is copied to the device at once: no pass waits for a copy.
    """

    index_T: Tensor  # of each token of host_batch in the original batch
    host_batch: B
    device_batch: B
    samples: Sequence[int]  # of each micro-batch
    tokens: Sequence[int]  # of each micro-batch

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[tuple[B, B]]:
        first_row = first_token = 0
        for samples, tokens in zip(self.samples, self.tokens, strict=True):
            part = slice(first_row, first_row + samples), slice(first_token, first_token + tokens)
            yield self.host_batch.view(*part), self.device_batch.view(*part)
            first_row, first_token = first_row + samples, first_token + tokens


def split_batch(batch: B, batching: MicroBatching, device: torch.device) -> MicroBatches[B]:
    lengths = batch.length_N.tolist()
    groups = batching.cut(lengths)
    order = torch.tensor([row for rows in groups for row in rows], dtype=torch.long)
    host_batch = batch.select(order)
    return MicroBatches(
        token_indices(batch.length_N, order),
        host_batch,
        host_batch.to(device),
        [len(rows) for rows in groups],
        [sum(lengths[row] for row in rows) for rows in groups],
    )


@torch.no_grad()
def score_batches(micro_batches: MicroBatches[B], outputs: ForwardFn) -> Tensor:
    """output_T of the batch in its original order, on the host."""
    outputs_T = [outputs(host_batch, device_batch).output_T.float() for host_batch, device_batch in micro_batches]
    output_T = torch.zeros(len(micro_batches.index_T))
    if outputs_T:  # a worker may have no samples
        output_T[micro_batches.index_T] = torch.cat(outputs_T).cpu()
    return output_T


def accumulate_gradients(
    passes: Iterable[tuple[TrainBatch, TrainBatch]],
    loss: MicroBatchLoss,
    objective: Objective,
    counts: Counts,
    total: Shares,
) -> None:
    """Accumulate the gradient of all passes in the parameters, and the objective's metrics in `total`.

    No tensor is read on the host here, as that would synchronise with the device.
    """
    tally = ObjectiveLoss(objective, counts, total)
    for host_batch, device_batch in passes:
        loss(host_batch, device_batch, partial(tally.loss_fn, CachedTrainBatch(**vars(device_batch)))).backward()


def read_metrics(total: Shares) -> Metrics:
    """Read all metrics with one device synchronisation."""
    numbers = torch.stack([value.double() for value in total.values()]).tolist() if total else []
    return dict(zip(total, numbers, strict=True))


@dataclass(frozen=True)
class ObjectiveLoss:
    """Calls the objective and sums up its metrics."""

    objective: Objective
    counts: Counts
    total: Shares

    def loss_fn(self, device_batch: TrainBatch, outputs: TokenOutputs, rows: slice, tokens: slice) -> Tensor:
        loss, shares = self.objective(outputs, device_batch.view(rows, tokens), self.counts)
        for name, value in shares.items():
            self.total[name] = self.total[name] + value if name in self.total else value
        return loss


class CachedTrainBatch(TrainBatch):
    """Caches two properties that objectives read for every metric; each takes several kernels to compute."""

    @cached_property
    def sample_T(self) -> Tensor:
        return super().sample_T

    @cached_property
    def loss_mask_T(self) -> Tensor:
        return super().loss_mask_T


def dummy_pass(device: torch.device) -> tuple[Batch, Batch]:
    """A pass of two tokens whose result is not used, to take part in the collectives of other ranks."""
    host_batch = Batch(
        tokens_T=torch.zeros(2, dtype=torch.long),
        mask_T=torch.tensor([False, True]),
        rollout_logprobs_T=torch.zeros(2),
        length_N=torch.tensor([2]),
        group_N=torch.zeros(1, dtype=torch.long),
        score_N=torch.zeros(1),
        valid_N=torch.tensor([False]),
    )
    return host_batch, host_batch.to(device)


def zero_loss(outputs: TokenOutputs, rows: slice, tokens: slice) -> Tensor:
    return outputs.output_T.sum() * 0.0
