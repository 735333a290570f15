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
from rloom.data.packing import MicroBatching
from rloom.models.network import Judge

B = TypeVar("B", bound=Batch)


class Outputs(Protocol):
    """The model's word on the samples of one pass, given on the host and on the device."""

    def __call__(self, here: Batch, there: Batch) -> TokenOutputs: ...


class Loss(Protocol):
    """The loss of one pass, with its gradient, as the judge of its parts has it."""

    def __call__(self, here: Batch, there: Batch, judge: Judge) -> Tensor: ...


@dataclass(frozen=True)
class Layout(Generic[B]):
    """A batch in the order in which its samples are passed, on the host and on the device.

    The whole batch is sent at once, in that order: a pass is then a stretch of it and keeps nobody waiting.
    """

    place_T: Tensor  # where, in the batch as it came, each token of `here` was
    here: B
    there: B
    samples: Sequence[int]  # of each pass
    tokens: Sequence[int]  # of each pass

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[tuple[B, B]]:
        first_row = first_token = 0
        for samples, tokens in zip(self.samples, self.tokens, strict=True):
            stretch = slice(first_row, first_row + samples), slice(first_token, first_token + tokens)
            yield self.here.stretch(*stretch), self.there.stretch(*stretch)
            first_row, first_token = first_row + samples, first_token + tokens


def lay_out(batch: B, batching: MicroBatching, device: torch.device) -> Layout[B]:
    lengths = batch.length_N.tolist()
    cuts = batching.cut(lengths)
    order = torch.tensor([row for rows in cuts for row in rows], dtype=torch.long)
    here = batch.select(order)
    return Layout(
        token_places(batch.length_N, order),
        here,
        here.to(device),
        [len(rows) for rows in cuts],
        [sum(lengths[row] for row in rows) for rows in cuts],
    )


@torch.no_grad()
def score_passes(layout: Layout[B], outputs: Outputs) -> Tensor:
    """output_T of the batch as it came, on the host."""
    found = [outputs(here, there).output_T.float() for here, there in layout]
    output_T = torch.zeros(len(layout.place_T))
    if found:  # a worker may be left without samples
        output_T[layout.place_T] = torch.cat(found).cpu()
    return output_T


def teach(
    passes: Iterable[tuple[TrainBatch, TrainBatch]], loss: Loss, objective: Objective, counts: Counts, total: Shares
) -> None:
    """Leave the gradient of all passes in the parameters; what the objective says of the metrics is added to `total`.

    Nothing is read: a number that is would make the host wait for the device.
    """
    tally = Tally(objective, counts, total)
    for here, there in passes:
        loss(here, there, partial(tally.judge, Reread(**vars(there)))).backward()


def read(total: Shares) -> Metrics:
    """All at once."""
    numbers = torch.stack([value.double() for value in total.values()]).tolist() if total else []
    return dict(zip(total, numbers, strict=True))


@dataclass(frozen=True)
class Tally:
    """Asks the objective, and adds up what it says of the metrics."""

    objective: Objective
    counts: Counts
    total: Shares

    def judge(self, there: TrainBatch, outputs: TokenOutputs, rows: slice, tokens: slice) -> Tensor:
        loss, shares = self.objective(outputs, there.stretch(rows, tokens), self.counts)
        for name, value in shares.items():
            self.total[name] = self.total[name] + value if name in self.total else value
        return loss


class Reread(TrainBatch):
    """Objectives ask for these two once a metric; on a device each answer is several kernels, so it is kept."""

    @cached_property
    def sample_T(self) -> Tensor:
        return super().sample_T

    @cached_property
    def loss_mask_T(self) -> Tensor:
        return super().loss_mask_T
