"""Log-prob and entropy of tokens straight from hidden states, forward and backward, a chunk of logits at a time.

T tokens, R tokens of a chunk, H hidden, V vocabulary, N samples. What a call holds does not grow with T * V. Where a
chunk's loss is known at once (`fused_loss`), the gradient in its logits is formed while they are there; where the
numbers of all tokens are wanted first (`fused_logprobs`), the backward pass makes the logits anew.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rloom.models.limits import LOGITS_AT_ONCE

HAS_TRITON = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA on Linux
ROWS_MULTIPLE = 128  # of a chunk: a matrix product works in tiles of so many rows


@dataclass(frozen=True)
class LogitOptions:
    """What a family does to its logits, and the temperature it is sampled at."""

    temperature: float = 1.0
    scale: float = 1.0  # logit_scale, 1 / logits_scaling
    softcap: float | None = None

    @property
    def inner(self) -> float:
        return self.scale if self.softcap is None else self.scale / self.softcap

    @property
    def outer(self) -> float:
        return (self.scale if self.softcap is None else self.softcap) / self.temperature

    def kernel_arguments(self) -> dict[str, Any]:
        return {"inner": self.inner, "outer": self.outer, "capped": self.softcap is not None}


def fused_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, form: LogitOptions, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy of its distribution, in float32.

    The arithmetic is in the precision of the hidden states. The weight may be kept more precisely than that; its
    gradient is summed in float32 and given in its own precision.
    """
    logprob_T, entropy_T = FusedHead.apply(hidden_TH, weight_VH, target_T.contiguous(), form, entropy_gradient)
    return logprob_T, entropy_T


# the index of a chunk, its log-probs and entropies -> what it adds to the loss
ChunkLossFn = Callable[[int, Tensor, Tensor], Tensor]


def fused_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    form: LogitOptions,
    chunks: Sequence[slice],  # of the tokens, in order, all of them, none empty
    loss_fn: ChunkLossFn,
    *,
    entropy_gradient: bool,
) -> Tensor:
    """The sum of what `judge` says of each chunk. The logits are computed once, also where there is a gradient.

    Precisions as in `fused_logprobs`. Only the gradients in hidden states and weight wait for the backward pass.
    """
    loss: Tensor = FusedLoss.apply(hidden_TH, weight_VH, target_T, form, chunks, loss_fn, entropy_gradient)
    return loss


def linear_float32(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits in float32 from hidden states and weight of any precision, with a gradient."""
    logits_TV: Tensor = Float32Product.apply(hidden_TH, weight_VH)
    return logits_TV


class Float32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_VH)
        return matmul_float32(hidden_TH, weight_VH.to(hidden_TH.dtype).T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_TH, weight_VH = ctx.saved_tensors
        gradient_TV = gradient_TV.to(hidden_TH.dtype)
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = matmul_float32(gradient_TV, weight_VH.to(hidden_TH.dtype)).to(hidden_TH.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = matmul_float32(gradient_TV.T, hidden_TH).to(weight_VH.dtype)
        return of_hidden, of_weight


class FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, form: LogitOptions, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        from rloom.models.head_kernels import row_numbers  # triton: only where the kernels run

        cast_VH = weight_VH.to(hidden_TH.dtype)
        logprob_T, total_T, entropy_T = (target_T.new_empty(len(target_T), dtype=torch.float32) for _ in range(3))
        rows = rows_per_chunk(len(hidden_TH), len(weight_VH))
        logits_RV = hidden_TH.new_empty((rows, len(weight_VH)), dtype=torch.float32)
        with torch.cuda.device_of(hidden_TH):
            for chunk in chunks(len(hidden_TH), rows):
                chunk_RV = logits_RV[: chunk.stop - chunk.start]
                matmul_float32(hidden_TH[chunk], cast_VH.T, out=chunk_RV)
                numbers = logprob_T[chunk], total_T[chunk], entropy_T[chunk]
                row_numbers(chunk_RV, target_T[chunk], numbers, **form.kernel_arguments())
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, total_T, entropy_T)
        ctx.form, ctx.entropy_gradient = form, entropy_gradient
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_gradient_T: Tensor, entropy_gradient_T: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        from rloom.models.head_kernels import logits_gradient

        hidden_TH, weight_VH, target_T, total_T, entropy_T = ctx.saved_tensors
        logprob_gradient_T, entropy_gradient_T = logprob_gradient_T.contiguous(), entropy_gradient_T.contiguous()
        cast_VH = weight_VH.to(hidden_TH.dtype)
        sums = GradientSums(hidden_TH, cast_VH, of_hidden=ctx.needs_input_grad[0], of_weight=ctx.needs_input_grad[1])
        rows = rows_per_chunk(len(hidden_TH), len(weight_VH))
        logits_RV = hidden_TH.new_empty((rows, len(weight_VH)), dtype=torch.float32)
        gradient_RV = hidden_TH.new_empty((rows, len(weight_VH)))
        with torch.cuda.device_of(hidden_TH):
            for chunk in chunks(len(hidden_TH), rows):
                chunk_RV, chunk_gradient_RV = (
                    buffer[: chunk.stop - chunk.start] for buffer in (logits_RV, gradient_RV)
                )
                matmul_float32(hidden_TH[chunk], cast_VH.T, out=chunk_RV)
                logits_gradient(
                    chunk_RV,
                    target_T[chunk],
                    (total_T[chunk], entropy_T[chunk]),
                    (logprob_gradient_T[chunk], entropy_gradient_T[chunk]),
                    chunk_gradient_RV,
                    **ctx.form.kernel_arguments(),
                    entropy_gradient=ctx.entropy_gradient,
                )
                sums.add(chunk, chunk_gradient_RV)
        return sums.hidden_TH, None if sums.weight_VH is None else sums.weight_VH.to(weight_VH.dtype), None, None, None


class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        form: LogitOptions,
        chunks: Sequence[slice],
        loss_fn: ChunkLossFn,
        entropy_gradient: bool,
    ) -> Tensor:
        from rloom.models.head_kernels import logits_gradient, row_numbers

        cast_VH = weight_VH.to(hidden_TH.dtype)
        sums = GradientSums(hidden_TH, cast_VH, of_hidden=ctx.needs_input_grad[0], of_weight=ctx.needs_input_grad[1])
        rows = max(chunk.stop - chunk.start for chunk in chunks)
        logits_RV = hidden_TH.new_empty((rows, len(weight_VH)), dtype=torch.float32)
        gradient_RV = hidden_TH.new_empty((rows, len(weight_VH)))
        loss = hidden_TH.new_zeros((), dtype=torch.float32)
        with torch.cuda.device_of(hidden_TH):
            for index, chunk in enumerate(chunks):
                # copied: a chunk may begin anywhere, and Triton compiles once more for addresses that are not aligned
                target_R = target_T[chunk].clone()
                logprob_R, total_R, entropy_R = (torch.empty_like(target_R, dtype=torch.float32) for _ in range(3))
                chunk_RV, chunk_gradient_RV = (buffer[: len(target_R)] for buffer in (logits_RV, gradient_RV))
                matmul_float32(hidden_TH[chunk], cast_VH.T, out=chunk_RV)
                row_numbers(chunk_RV, target_R, (logprob_R, total_R, entropy_R), **form.kernel_arguments())
                chunk_loss, gradients = chunk_gradients(loss_fn, index, logprob_R, entropy_R, entropy_gradient)
                loss += chunk_loss
                logits_gradient(
                    chunk_RV,
                    target_R,
                    (total_R, entropy_R),
                    gradients,
                    chunk_gradient_RV,
                    **form.kernel_arguments(),
                    entropy_gradient=entropy_gradient,
                )
                sums.add(chunk, chunk_gradient_RV)
        ctx.save_for_backward(sums.hidden_TH, sums.weight_VH)
        ctx.dtypes = hidden_TH.dtype, weight_VH.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # the weight's sum changes its precision here anyway: to multiply it on the way costs nothing
        hidden_TH, weight_VH = (
            None if found is None else torch.mul(found, gradient, out=torch.empty_like(found, dtype=dtype))
            for found, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden_TH, weight_VH, None, None, None, None, None


def chunk_gradients(
    loss_fn: ChunkLossFn, index: int, logprob_R: Tensor, entropy_R: Tensor, entropy_gradient: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The loss, and its gradients in log-prob and entropy; where an entropy has none, nobody reads the second."""
    with torch.enable_grad():
        logprob_R = logprob_R.detach().requires_grad_()
        entropy_R = entropy_R.detach().requires_grad_(entropy_gradient)
        loss = loss_fn(index, logprob_R, entropy_R)
    wanted = (logprob_R, entropy_R) if entropy_gradient else (logprob_R,)
    found = [gradient.contiguous() for gradient in torch.autograd.grad(loss, wanted, materialize_grads=True)]
    return loss.detach(), (found[0], found[-1])


class GradientSums:
    """The loss's gradients in hidden states and weight, as far as they are wanted, from those in the logits."""

    def __init__(self, of_TH: Tensor, of_VH: Tensor, *, of_hidden: bool, of_weight: bool) -> None:
        self.of_TH = of_TH
        self.of_VH = of_VH
        self.hidden_TH = torch.empty_like(of_TH) if of_hidden else None
        self.weight_VH: Tensor | None = None
        if of_weight:
            # the first chunk writes, the next ones add; without any it is zero
            make = torch.empty if len(of_TH) else torch.zeros
            self.weight_VH = make(of_VH.shape, dtype=torch.float32, device=of_VH.device)

    def add(self, chunk: slice, gradient_RV: Tensor) -> None:
        if self.hidden_TH is not None:
            # a sum over the whole vocabulary: rounded once, at its end
            sum_RH = self.of_TH.new_empty((len(gradient_RV), self.of_TH.shape[1]), dtype=torch.float32)
            self.hidden_TH[chunk] = matmul_float32(gradient_RV, self.of_VH, out=sum_RH)
        if self.weight_VH is not None:
            matmul_float32(gradient_RV.T, self.of_TH[chunk], out=self.weight_VH, add=chunk.start > 0)


def rows_per_chunk(tokens: int, vocabulary: int) -> int:
    """As many as the limit allows, in chunks of about one size: a last chunk of few rows would pay for a whole one."""
    most = max(1, LOGITS_AT_ONCE // vocabulary)
    multiple = ROWS_MULTIPLE if most > ROWS_MULTIPLE else 1
    most -= most % multiple
    even = -(-tokens // max(1, -(-tokens // most)))
    return min(tokens, -(-even // multiple) * multiple)


@dataclass(frozen=True)
class SampleRange:
    """Neighbouring samples of a pass."""

    rows: slice
    tokens: slice
    answers: slice  # of the tokens that the policy wrote


def sample_ranges(place_T: Tensor, length_N: Tensor, vocabulary: int) -> list[SampleRange]:
    """All samples, given the places of what they wrote, in few parts of about one size, the logits of each at once.

    No part where a sample alone has more of them than that, or where none wrote anything.
    """
    most = LOGITS_AT_ONCE // vocabulary
    end_N = length_N.cumsum(0)
    written_N = torch.searchsorted(place_T, end_N)  # up to the end of each sample
    counts = written_N.diff(prepend=written_N.new_zeros(1)).tolist()
    if not 0 < max(counts) <= most:
        return []
    ends, tokens, answers = even_ends(counts, most), [0, *end_N.tolist()], [0, *written_N.tolist()]
    return [
        SampleRange(slice(first, last), slice(tokens[first], tokens[last]), slice(answers[first], answers[last]))
        for first, last in pairwise([0, *ends])
    ]


def even_ends(counts: Sequence[int], most: int) -> list[int]:
    """Where each part ends: of `most` at most, and near its share of what as few parts as possible have to hold."""
    parts = len(range_ends(counts, most, 1))
    return range_ends(counts, most, parts)


def range_ends(counts: Sequence[int], most: int, parts: int) -> list[int]:
    """Where each of `parts` even parts ends; more of them where `most` does not allow for so few."""
    ends: list[int] = []
    left, filled = sum(counts), 0
    for row, count in enumerate(counts):
        share = left / max(1, parts - len(ends))
        if filled and (filled + count > most or filled + count / 2 > share):
            ends.append(row)
            left, filled = left - filled, 0
        filled += count
    return [*ends, len(counts)]


def chunks(tokens: int, rows: int) -> Iterator[slice]:
    for first in range(0, tokens, max(1, rows)):
        yield slice(first, min(first + rows, tokens))


def matmul_float32(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """a @ b of any precision, summed and written in float32; with `add`, added to what `out` holds. No gradient.

    CUDA does so without float32 copies of a and b.
    """
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    if not a.numel():  # no rows, or nothing to sum: not every kernel takes that
        return out if add else out.zero_()
    if a.is_cuda and a.dtype != torch.float32:
        if add:
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    if add:
        return torch.addmm(out, a.float(), b.float(), out=out)
    return torch.mm(a.float(), b.float(), out=out)
