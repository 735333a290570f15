"""How any engine takes a batch through its model: cut into passes, in an order that suits them, and put back."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Metrics, Objective, Shares
from rloom.batch import Batch, TokenOutputs, TrainBatch, token_places
from rloom.models.network import LossFn
from rloom.packing import MicroBatching

B = TypeVar("B", bound=Batch)


class ForwardFn(Protocol):
    """The model's word on the samples of one pass, given on the host and on the device."""

    def __call__(self, host_batch: Batch, device_batch: Batch) -> TokenOutputs: ...


class MicroBatchLoss(Protocol):
    """The loss of one pass, with its gradient, as the judge of its parts has it."""

    def __call__(self, host_batch: Batch, device_batch: Batch, loss_fn: LossFn) -> Tensor: ...


@dataclass(frozen=True)
class MicroBatches(Generic[B]):
    """A batch in the order in which its samples are passed, on the host and on the device.

    The whole batch is sent at once, in that order: a pass is then a stretch of it and keeps nobody waiting.
    """

    position_T: Tensor  # where, in the batch as it came, each token of `here` was
    host_batch: B
    device_batch: B
    samples: Sequence[int]  # of each pass
    tokens: Sequence[int]  # of each pass

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[tuple[B, B]]:
        first_row = first_token = 0
        for samples, tokens in zip(self.samples, self.tokens, strict=True):
            view = slice(first_row, first_row + samples), slice(first_token, first_token + tokens)
            yield self.host_batch.view(*view), self.device_batch.view(*view)
            first_row, first_token = first_row + samples, first_token + tokens


def split_batch(batch: B, batching: MicroBatching, device: torch.device) -> MicroBatches[B]:
    lengths = batch.length_N.tolist()
    cuts = batching.cut(lengths)
    order = torch.tensor([row for rows in cuts for row in rows], dtype=torch.long)
    host_batch = batch.select(order)
    return MicroBatches(
        token_places(batch.length_N, order),
        host_batch,
        host_batch.to(device),
        [len(rows) for rows in cuts],
        [sum(lengths[row] for row in rows) for rows in cuts],
    )


@torch.no_grad()
def score_batches(micro_batches: MicroBatches[B], outputs: ForwardFn) -> Tensor:
    """output_T of the batch as it came, on the host."""
    found = [outputs(host_batch, device_batch).output_T.float() for host_batch, device_batch in micro_batches]
    output_T = torch.zeros(len(micro_batches.position_T))
    if found:  # a worker may be left without samples
        output_T[micro_batches.position_T] = torch.cat(found).cpu()
    return output_T


def accumulate_gradients(
    passes: Iterable[tuple[TrainBatch, TrainBatch]],
    loss: MicroBatchLoss,
    objective: Objective,
    counts: Counts,
    total: Shares,
) -> None:
    """Leave the gradient of all passes in the parameters; what the objective says of the metrics is added to `total`.

    Nothing is read: a number that is would make the host wait for the device.
    """
    tally = ObjectiveLoss(objective, counts, total)
    for host_batch, device_batch in passes:
        loss(host_batch, device_batch, partial(tally.loss_fn, CachedTrainBatch(**vars(device_batch)))).backward()


def read_metrics(total: Shares) -> Metrics:
    """All at once."""
    numbers = torch.stack([value.double() for value in total.values()]).tolist() if total else []
    return dict(zip(total, numbers, strict=True))


@dataclass(frozen=True)
class ObjectiveLoss:
    """Asks the objective, and adds up what it says of the metrics."""

    objective: Objective
    counts: Counts
    total: Shares

    def loss_fn(self, device_batch: TrainBatch, outputs: TokenOutputs, rows: slice, tokens: slice) -> Tensor:
        loss, shares = self.objective(outputs, device_batch.view(rows, tokens), self.counts)
        for name, value in shares.items():
            self.total[name] = self.total[name] + value if name in self.total else value
        return loss


class CachedTrainBatch(TrainBatch):
    """Objectives ask for these two once a metric; on a device each answer is several kernels, so it is kept."""

    @cached_property
    def sample_T(self) -> Tensor:
        return super().sample_T

    @cached_property
    def loss_mask_T(self) -> Tensor:
        return super().loss_mask_T
