"""Run a batch as micro-batches: split it, run a pass for each, and restore the order of the samples."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Metrics, Objective, Shares
from rloom.batch import Batch, TokenOutputs, TrainBatch, token_indices
from rloom.models.network import LossFn
from rloom.packing import MicroBatching, RowPrompt

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

    index_T: Tensor  # position in the original batch of each token of host_batch
    host_batch: B
    device_batch: B
    samples: Sequence[int]  # number in each micro-batch
    tokens: Sequence[int]  # number in each micro-batch

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[tuple[B, B]]:
        first_row = first_token = 0
        for samples, tokens in zip(self.samples, self.tokens, strict=True):
            part = slice(first_row, first_row + samples), slice(first_token, first_token + tokens)
            yield self.host_batch.view(*part), self.device_batch.view(*part)
            first_row, first_token = first_row + samples, first_token + tokens


def split_batch(
    batch: B,
    batching: MicroBatching,
    device: torch.device,
    prompts: Sequence[RowPrompt] | None = None,  # of each sample, iff the model computes equal ones once
) -> MicroBatches[B]:
    lengths = batch.length_N.tolist()
    groups = batching.cut(lengths, prompts)
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
    passes: Iterable[tuple[TrainBatch, TrainBatch]], loss: MicroBatchLoss, objective_loss: "ObjectiveLoss"
) -> None:
    """Accumulate the gradient of all passes in the parameters.

    No tensor is read on the host here, as that would synchronise with the device.
    """
    first_token = 0
    for host_batch, device_batch in passes:
        loss(host_batch, device_batch, objective_loss.of_pass(device_batch, first_token)).backward()
        first_token += len(host_batch.tokens_T)


@dataclass(frozen=True)
class Recorded:
    """A model's outputs for the tokens of a batch, on the device, in the order of the passes."""

    index_T: Tensor  # as in MicroBatches
    output_T: Tensor
    entropy_T: Tensor
    chosen_T: Tensor | None  # bool, on the host: the tokens whose outputs are read. None: all

    @classmethod
    def empty(cls, micro_batches: MicroBatches[TrainBatch]) -> "Recorded":
        host_batch, device = micro_batches.host_batch, micro_batches.device_batch.tokens_T.device
        zeros_T = torch.zeros(len(micro_batches.index_T), device=device)
        chosen_N = host_batch.recorded_N
        chosen_T = None if chosen_N is None else chosen_N[host_batch.sample_T]
        return cls(micro_batches.index_T, zeros_T, zeros_T.clone(), chosen_T)

    def put(self, first_token: int, outputs: TokenOutputs) -> None:
        assert outputs.entropy_T is not None  # only a policy's outputs are recorded
        part = slice(first_token, first_token + len(outputs.output_T))
        self.output_T[part] = outputs.output_T.detach()
        self.entropy_T[part] = outputs.entropy_T.detach()

    def read(self) -> TokenOutputs:
        """In the order of the batch, on the host."""
        numbers_2T, index_T = torch.stack([self.output_T, self.entropy_T]), self.index_T
        if self.chosen_T is not None:
            numbers_2T = numbers_2T[:, self.chosen_T.to(numbers_2T.device)]
            index_T = index_T[self.chosen_T].argsort().argsort()  # the place of each among those that are read
        ordered_2T = torch.empty(numbers_2T.shape)
        ordered_2T[:, index_T] = numbers_2T.cpu()
        return TokenOutputs(*ordered_2T)


@dataclass
class Tally:
    """What the passes of one update report, on the device until it is read: the objective's metrics, and the model's
    output for each token if the objective records them."""

    shares: Shares = field(default_factory=dict)
    recorded: Recorded | None = None

    def begin(self, objective: Objective, counts: Counts, micro_batches: MicroBatches[TrainBatch]) -> "ObjectiveLoss":
        if objective.records_tokens:
            self.recorded = Recorded.empty(micro_batches)
        return ObjectiveLoss(objective, counts, self)

    def read_metrics(self) -> Metrics:
        """With one device synchronisation."""
        numbers = torch.stack([value.double() for value in self.shares.values()]).tolist() if self.shares else []
        return dict(zip(self.shares, numbers, strict=True))

    def read_outputs(self) -> TokenOutputs | None:
        return None if self.recorded is None else self.recorded.read()


@dataclass(frozen=True)
class ObjectiveLoss:
    """Calls the objective for each pass and adds to the tally."""

    objective: Objective
    counts: Counts
    tally: Tally

    def of_pass(self, device_batch: TrainBatch, first_token: int) -> LossFn:
        """`first_token`: of the micro-batch, among those of all micro-batches."""
        return partial(self._loss, CachedTrainBatch(**vars(device_batch)), first_token)

    def _loss(
        self, device_batch: TrainBatch, first_token: int, outputs: TokenOutputs, rows: slice, tokens: slice
    ) -> Tensor:
        loss, shares = self.objective(outputs, device_batch.view(rows, tokens), self.counts)
        total = self.tally.shares
        for name, value in shares.items():
            total[name] = total[name] + value if name in total else value
        if self.tally.recorded is not None:
            self.tally.recorded.put(first_token + (tokens.start or 0), outputs)
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
