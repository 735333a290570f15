"""Triton kernels of the head: elementwise work on logits between two matmuls. R rows of a chunk, V vocabulary.

A logit becomes z = outer * tanh(inner * logit), or z = outer * logit if the family does not cap its logits.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits of a program at a time: 8 per thread, for occupancy
WARPS = 8
LOADS_AHEAD = tl.constexpr(3)
LOWEST = tl.constexpr(-1e30)  # below any logit, and finite: differences are never NaN

jit: Callable[[Callable[..., Any]], Any] = triton.jit


@jit
def transform_logit(logit: tl.tensor, inner: tl.tensor, outer: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    """z, and its derivative with respect to the logit."""
    if CAPPED:
        tanh = 1 - 2 / (tl.exp(2 * inner * logit) + 1)
        return outer * tanh, outer * inner * (1 - tanh * tanh)
    else:
        return outer * logit, outer


@jit
def merge_stats(
    max_a: tl.tensor, sum_a: tl.tensor, moment_a: tl.tensor, max_b: tl.tensor, sum_b: tl.tensor, moment_b: tl.tensor
) -> tl.tensor:
    """Merge the statistics of two sets of z: the maximum, and the sums of e = exp(z - max) and of e * (z - max).

    Relative to the maximum, both terms of the entropy are positive: nothing cancels, however large the logits are.
    """
    lead = max_a - max_b
    less = tl.exp(-tl.abs(lead))
    weight_a = tl.where(lead >= 0, 1.0, less)
    weight_b = tl.where(lead >= 0, less, 1.0)
    moved_a = moment_a + sum_a * tl.minimum(lead, 0.0)
    moved_b = moment_b + sum_b * tl.minimum(-lead, 0.0)
    return (
        tl.maximum(max_a, max_b),
        weight_a * sum_a + weight_b * sum_b,
        weight_a * moved_a + weight_b * moved_b,
    )


@jit
def row_stats_kernel(
    logits_RV: tl.tensor,
    target_R: tl.tensor,
    logprob_R: tl.tensor,
    logsumexp_R: tl.tensor,
    entropy_R: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    CAPPED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # row * VOCABULARY overflows int32
    logits_V = logits_RV + row * VOCABULARY
    lane = tl.arange(0, BLOCK)
    # statistics per lane: threads synchronise once per row, not once per block
    max_z = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    moment = tl.full([BLOCK], 0.0, tl.float32)
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=LOADS_AHEAD):
        index = first + lane
        mask = index < VOCABULARY
        z, _ = transform_logit(tl.load(logits_V + index, mask=mask, other=0.0), inner, outer, CAPPED)
        max_z, total, moment = merge_stats(max_z, total, moment, tl.where(mask, z, LOWEST), 1.0, 0.0)
    max_z, total, moment = tl.reduce((max_z, total, moment), 0, merge_stats)
    target = tl.load(target_R + row)
    valid = (target >= 0) & (target < VOCABULARY)
    z, _ = transform_logit(tl.load(logits_V + target, mask=valid, other=float("nan")), inner, outer, CAPPED)
    log_total = tl.log(total)
    tl.store(logprob_R + row, z - max_z - log_total)
    tl.store(logsumexp_R + row, max_z + log_total)
    tl.store(entropy_R + row, log_total - moment / total)


@jit
def logits_gradient_kernel(
    logits_RV: tl.tensor,
    target_R: tl.tensor,
    logsumexp_R: tl.tensor,
    entropy_R: tl.tensor,
    logprob_gradient_R: tl.tensor,
    entropy_gradient_R: tl.tensor,
    gradient_RV: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < VOCABULARY
    logit = tl.load(logits_RV + row * VOCABULARY + index, mask=mask, other=0.0)
    z, slope = transform_logit(logit, inner, outer, CAPPED)
    logprob = z - tl.load(logsumexp_R + row)
    probability = tl.exp(logprob)
    is_target = tl.where(index == tl.load(target_R + row), 1.0, 0.0)
    gradient = tl.load(logprob_gradient_R + row) * (is_target - probability)
    if ENTROPY:
        gradient -= tl.load(entropy_gradient_R + row) * probability * (logprob + tl.load(entropy_R + row))
    gradient = (gradient * slope).to(gradient_RV.dtype.element_ty)
    tl.store(gradient_RV + row * VOCABULARY + index, gradient, mask=mask)


def row_stats(
    logits_RV: Tensor,
    target_R: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    inner: float,
    outer: float,
    capped: bool,
) -> None:
    """Write each row's log-prob of the target, logsumexp of z, and entropy; reads the logits once."""
    rows, vocabulary = logits_RV.shape
    row_stats_kernel[(rows,)](
        logits_RV,
        target_R,
        *out,
        inner,
        outer,
        CAPPED=capped,
        VOCABULARY=vocabulary,
        BLOCK=block_of(vocabulary),
        num_warps=WARPS,
    )


def logits_gradient(
    logits_RV: Tensor,
    target_R: Tensor,
    stats: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    out_RV: Tensor,
    *,
    inner: float,
    outer: float,
    capped: bool,
    entropy_gradient: bool,
) -> None:
    """Write the loss's gradient with respect to the logits, from the rows' stats (logsumexp, entropy) and the loss's
    gradients with respect to log-prob and entropy."""
    rows, vocabulary = logits_RV.shape
    block = block_of(vocabulary)
    logits_gradient_kernel[(rows, triton.cdiv(vocabulary, block))](
        logits_RV,
        target_R,
        *stats,
        *gradients,
        out_RV,
        inner,
        outer,
        CAPPED=capped,
        ENTROPY=entropy_gradient,
        VOCABULARY=vocabulary,
        BLOCK=block,
        num_warps=WARPS,
    )


def block_of(vocabulary: int) -> int:
    return min(BLOCK, 1 << (vocabulary - 1).bit_length())  # a power of two
