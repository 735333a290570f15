"""Log-prob and entropy of tokens from hidden states, forward and backward, with the logits of one chunk in memory.

T tokens, A of them in the mask, R of a chunk, H hidden size, V vocabulary, N samples. `fused_logprobs` returns the
log-probs of all tokens first, so its backward pass computes each chunk's logits again. `fused_loss` avoids that second
matmul: it calls the loss function back for each chunk while the chunk's logits exist, and computes their gradient at
once. The loss must be a sum over chunks, so a chunk consists of whole samples (`sample_ranges`).
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rloom.algos.kl import full_kl
from rloom.models.limits import LOGITS_AT_ONCE

CHUNK_LOGITS = 2**26  # numbers of a chunk in `token_logprobs`: 256 MB of float32
HAS_TRITON = importlib.util.find_spec("triton") is not None  # a dependency of torch for CUDA on Linux
ROWS_MULTIPLE = 128  # rows of a chunk are a multiple of this: the tile size of a matmul


@dataclass(frozen=True)
class LogitOptions:
    """A family's logit transform and the temperature: z = outer * tanh(inner * logit), or outer * logit uncapped."""

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
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, options: LogitOptions, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy of its distribution, in float32.

    Matmuls run in the dtype of the hidden states. The weight may have a higher precision; its gradient is accumulated
    in float32 and returned in the weight's dtype.
    """
    logprob_T, entropy_T = FusedHead.apply(hidden_TH, weight_VH, target_T.contiguous(), options, entropy_gradient)
    return logprob_T, entropy_T


# (index of a chunk, its log-probs, its entropies) -> its term of the loss
ChunkLossFn = Callable[[int, Tensor, Tensor], Tensor]


def fused_loss(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    options: LogitOptions,
    chunks: Sequence[slice],  # cover the tokens in order; none is empty
    loss_fn: ChunkLossFn,
    *,
    entropy_gradient: bool,
) -> Tensor:
    """The sum of `loss_fn` over the chunks, with dtypes as in `fused_logprobs`. The logits are computed once.

    The forward pass computes the gradients of hidden states and weight; the backward pass only scales them.
    """
    loss: Tensor = FusedLoss.apply(hidden_TH, weight_VH, target_T, options, chunks, loss_fn, entropy_gradient)
    return loss


def linear_float32(hidden_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits in float32 from hidden states and weight of any dtype, differentiable."""
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
        hidden_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            hidden_gradient = matmul_float32(gradient_TV, weight_VH.to(hidden_TH.dtype)).to(hidden_TH.dtype)
        if ctx.needs_input_grad[1]:
            weight_gradient = matmul_float32(gradient_TV.T, hidden_TH).to(weight_VH.dtype)
        return hidden_gradient, weight_gradient


class FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, options: LogitOptions, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        from rloom.models.head_kernels import row_stats  # imports triton

        cast_VH = weight_VH.to(hidden_TH.dtype)
        logprob_T, logsumexp_T, entropy_T = (target_T.new_empty(len(target_T), dtype=torch.float32) for _ in range(3))
        rows = rows_per_chunk(len(hidden_TH), len(weight_VH))
        logits_RV = hidden_TH.new_empty((rows, len(weight_VH)), dtype=torch.float32)
        with torch.cuda.device_of(hidden_TH):
            for chunk in chunks(len(hidden_TH), rows):
                chunk_RV = logits_RV[: chunk.stop - chunk.start]
                matmul_float32(hidden_TH[chunk], cast_VH.T, out=chunk_RV)
                stats = logprob_T[chunk], logsumexp_T[chunk], entropy_T[chunk]
                row_stats(chunk_RV, target_T[chunk], stats, **options.kernel_arguments())
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        ctx.save_for_backward(hidden_TH, weight_VH, target_T, logsumexp_T, entropy_T)
        ctx.options, ctx.entropy_gradient = options, entropy_gradient
        return logprob_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_gradient_T: Tensor, entropy_gradient_T: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        from rloom.models.head_kernels import logits_gradient

        hidden_TH, weight_VH, target_T, logsumexp_T, entropy_T = ctx.saved_tensors
        logprob_gradient_T, entropy_gradient_T = logprob_gradient_T.contiguous(), entropy_gradient_T.contiguous()
        cast_VH = weight_VH.to(hidden_TH.dtype)
        sums = GradientSums(hidden_TH, cast_VH, *ctx.needs_input_grad[:2])
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
                    (logsumexp_T[chunk], entropy_T[chunk]),
                    (logprob_gradient_T[chunk], entropy_gradient_T[chunk]),
                    chunk_gradient_RV,
                    **ctx.options.kernel_arguments(),
                    entropy_gradient=ctx.entropy_gradient,
                )
                sums.add(chunk, chunk_gradient_RV)
        gradient_VH = None if sums.weight_gradient_VH is None else sums.weight_gradient_VH.to(weight_VH.dtype)
        return sums.hidden_gradient_TH, gradient_VH, None, None, None


class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        options: LogitOptions,
        chunks: Sequence[slice],
        loss_fn: ChunkLossFn,
        entropy_gradient: bool,
    ) -> Tensor:
        from rloom.models.head_kernels import logits_gradient, row_stats

        cast_VH = weight_VH.to(hidden_TH.dtype)
        sums = GradientSums(hidden_TH, cast_VH, *ctx.needs_input_grad[:2])
        rows = max(chunk.stop - chunk.start for chunk in chunks)
        logits_RV = hidden_TH.new_empty((rows, len(weight_VH)), dtype=torch.float32)
        gradient_RV = hidden_TH.new_empty((rows, len(weight_VH)))
        loss = hidden_TH.new_zeros((), dtype=torch.float32)
        with torch.cuda.device_of(hidden_TH):
            for index, chunk in enumerate(chunks):
                # a copy, since Triton compiles another kernel for pointers that are not aligned
                target_R = target_T[chunk].clone()
                logprob_R, logsumexp_R, entropy_R = (torch.empty_like(target_R, dtype=torch.float32) for _ in range(3))
                chunk_RV, chunk_gradient_RV = (buffer[: len(target_R)] for buffer in (logits_RV, gradient_RV))
                matmul_float32(hidden_TH[chunk], cast_VH.T, out=chunk_RV)
                row_stats(chunk_RV, target_R, (logprob_R, logsumexp_R, entropy_R), **options.kernel_arguments())
                chunk_loss, gradients = chunk_gradients(loss_fn, index, logprob_R, entropy_R, entropy_gradient)
                loss += chunk_loss
                logits_gradient(
                    chunk_RV,
                    target_R,
                    (logsumexp_R, entropy_R),
                    gradients,
                    chunk_gradient_RV,
                    **options.kernel_arguments(),
                    entropy_gradient=entropy_gradient,
                )
                sums.add(chunk, chunk_gradient_RV)
        ctx.save_for_backward(sums.hidden_gradient_TH, sums.weight_gradient_VH)
        ctx.dtypes = hidden_TH.dtype, weight_VH.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # the cast to the weight's dtype is needed anyway; multiplying in the same kernel costs nothing
        hidden_TH, weight_VH = (
            None if total is None else torch.mul(total, gradient, out=torch.empty_like(total, dtype=dtype))
            for total, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden_TH, weight_VH, None, None, None, None, None


def chunk_gradients(
    loss_fn: ChunkLossFn, index: int, logprob_R: Tensor, entropy_R: Tensor, entropy_gradient: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The loss, and its gradients with respect to log-prob and entropy; the latter is unused without one."""
    with torch.enable_grad():
        logprob_R = logprob_R.detach().requires_grad_()
        entropy_R = entropy_R.detach().requires_grad_(entropy_gradient)
        loss = loss_fn(index, logprob_R, entropy_R)
    inputs = (logprob_R, entropy_R) if entropy_gradient else (logprob_R,)
    gradients = [gradient.contiguous() for gradient in torch.autograd.grad(loss, inputs, materialize_grads=True)]
    return loss.detach(), (gradients[0], gradients[-1])


class GradientSums:
    """Gradients of hidden states and weight, where required, from the gradients of the chunks' logits."""

    def __init__(self, hidden_TH: Tensor, cast_VH: Tensor, needs_hidden: bool, needs_weight: bool) -> None:
        self.hidden_TH = hidden_TH
        self.cast_VH = cast_VH
        self.hidden_gradient_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        self.weight_gradient_VH: Tensor | None = None
        if needs_weight:
            # the first chunk writes, later ones add; zero without any
            make = torch.empty if len(hidden_TH) else torch.zeros
            self.weight_gradient_VH = make(cast_VH.shape, dtype=torch.float32, device=cast_VH.device)

    def add(self, chunk: slice, gradient_RV: Tensor) -> None:
        if self.hidden_gradient_TH is not None:
            # summed over the vocabulary in float32, rounded once
            sum_RH = self.hidden_TH.new_empty((len(gradient_RV), self.hidden_TH.shape[1]), dtype=torch.float32)
            self.hidden_gradient_TH[chunk] = matmul_float32(gradient_RV, self.cast_VH, out=sum_RH)
        if self.weight_gradient_VH is not None:
            matmul_float32(gradient_RV.T, self.hidden_TH[chunk], out=self.weight_gradient_VH, add=chunk.start > 0)


def rows_per_chunk(tokens: int, vocabulary: int) -> int:
    """As many as the limit allows, in chunks of about equal size: a small last chunk costs as much as a full one."""
    limit = max(1, LOGITS_AT_ONCE // vocabulary)
    multiple = ROWS_MULTIPLE if limit > ROWS_MULTIPLE else 1
    limit -= limit % multiple
    even = -(-tokens // max(1, -(-tokens // limit)))
    return min(tokens, -(-even // multiple) * multiple)


@dataclass(frozen=True)
class SampleRange:
    """Consecutive samples of a micro-batch."""

    rows: slice
    tokens: slice
    answers: slice  # range of the tokens in the mask


def sample_ranges(index_A: Tensor, length_N: Tensor, vocabulary: int) -> list[SampleRange]:
    """Split the samples into few ranges of about equal size, each with at most LOGITS_AT_ONCE logits.

    `index_A`: indices of the tokens in the mask. Empty if one sample exceeds the limit, or if the mask is empty.
    """
    limit = LOGITS_AT_ONCE // vocabulary
    end_N = length_N.cumsum(0)
    answered_N = torch.searchsorted(index_A, end_N)  # tokens in the mask up to the end of each sample
    counts = answered_N.diff(prepend=answered_N.new_zeros(1)).tolist()
    if not 0 < max(counts) <= limit:
        return []
    ends, tokens, answers = even_ends(counts, limit), [0, *end_N.tolist()], [0, *answered_N.tolist()]
    return [
        SampleRange(slice(first, last), slice(tokens[first], tokens[last]), slice(answers[first], answers[last]))
        for first, last in pairwise([0, *ends])
    ]


def even_ends(counts: Sequence[int], limit: int) -> list[int]:
    """Ends of as few ranges as possible, each with at most `limit` tokens, about equally full."""
    parts = len(range_ends(counts, limit, 1))
    return range_ends(counts, limit, parts)


def range_ends(counts: Sequence[int], limit: int, parts: int) -> list[int]:
    """Ends of `parts` even ranges; of more where `limit` requires it."""
    ends: list[int] = []
    left, filled = sum(counts), 0
    for row, count in enumerate(counts):
        share = left / max(1, parts - len(ends))
        if filled and (filled + count > limit or filled + count / 2 > share):
            ends.append(row)
            left, filled = left - filled, 0
        filled += count
    return [*ends, len(counts)]


def chunks(tokens: int, rows: int) -> Iterator[slice]:
    for first in range(0, tokens, max(1, rows)):
        yield slice(first, min(first + rows, tokens))


def matmul_float32(a: Tensor, b: Tensor, *, out: Tensor | None = None, add: bool = False) -> Tensor:
    """a @ b of any dtype, accumulated and written in float32; `add`: added to `out`. Not differentiable.

    On CUDA this needs no float32 copies of a and b.
    """
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32)
    if not a.numel():  # not every kernel accepts empty matrices
        return out if add else out.zero_()
    if a.is_cuda and a.dtype != torch.float32:
        if add:
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    if add:
        return torch.addmm(out, a.float(), b.float(), out=out)
    return torch.mm(a.float(), b.float(), out=out)


Logits = Callable[[Tensor], Tensor]
Outputs = tuple[Tensor, Tensor, Tensor]  # log-prob, entropy, KL


def token_logprobs(
    logits: Logits,
    hidden_TH: Tensor,
    target_T: Tensor,
    *,
    temperature: float,
    chunked: bool,
    entropy_gradient: bool,
    reference: tuple[Logits, Tensor] | None = None,
) -> Outputs:
    """Log-prob of each target, entropy of its distribution, and KL of that distribution to the reference's, at
    `temperature`, in float32. `reference`: its head and its hidden states; without one the KL is 0."""

    def chunk_outputs(hidden: Tensor, target: Tensor, reference_hidden: Tensor | None) -> Outputs:
        chunk_logits = logits(hidden).float() / temperature
        logprobs, entropy = logprob_and_entropy(chunk_logits, target, entropy_gradient)
        if reference is None or reference_hidden is None:
            return logprobs, entropy, torch.zeros_like(entropy)
        with torch.no_grad():
            reference_logits = reference[0](reference_hidden).float() / temperature
        return logprobs, entropy, full_kl(chunk_logits, reference_logits)

    reference_hidden_TH = None if reference is None else reference[1]
    vocabulary = logits(hidden_TH[:0]).shape[-1]
    chunk = max(1, CHUNK_LOGITS // vocabulary) if chunked else max(1, len(hidden_TH))
    if len(hidden_TH) <= chunk:
        return chunk_outputs(hidden_TH, target_T, reference_hidden_TH)
    outputs = []
    for first in range(0, len(hidden_TH), chunk):
        span = slice(first, first + chunk)
        reference_hidden = None if reference_hidden_TH is None else reference_hidden_TH[span]
        # the backward pass recomputes these logits
        outputs.append(
            checkpoint(chunk_outputs, hidden_TH[span], target_T[span], reference_hidden, use_reentrant=False)
        )
    logprobs, entropies, kls = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(kls)


def logprob_and_entropy(logits_TV: Tensor, target_T: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    total_T = torch.logsumexp(logits_TV, -1)
    logprobs_T = logits_TV.gather(-1, target_T[:, None]).squeeze(1) - total_T
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probability_TV = (logits_TV - total_T[:, None]).exp()
        entropy_T = total_T - (probability_TV * logits_TV).sum(-1)
    return logprobs_T, entropy_T
