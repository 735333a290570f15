"""Triton kernels of the head: what is done to each logit between two matrix products. R rows of a chunk, V vocabulary.

A logit becomes z = outer * tanh(inner * logit), or z = outer * logit where the family does not cap its logits.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits that a program holds at once: 8 a thread, so that enough programs fit a processor
WARPS = 8
LOADS_AHEAD = tl.constexpr(3)
LOWEST = tl.constexpr(-1e30)  # beneath any logit, and finite: no difference of two of them is NaN

jit: Callable[[Callable[..., Any]], Any] = triton.jit


@jit
def formed(logit: tl.tensor, inner: tl.tensor, outer: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    """z, and its derivative in the logit."""
    if CAPPED:
        tanh = 1 - 2 / (tl.exp(2 * inner * logit) + 1)
        return outer * tanh, outer * inner * (1 - tanh * tanh)
    else:
        return outer * logit, outer


@jit
def merged(
    top_a: tl.tensor, sum_a: tl.tensor, moment_a: tl.tensor, top_b: tl.tensor, sum_b: tl.tensor, moment_b: tl.tensor
) -> tl.tensor:
    """Two sets of z as one. A set is its largest z, and the sums of e = exp(z - largest) and of e * (z - largest).

    Counted from the largest, both parts of the entropy are positive: nothing cancels, however large the logits are.
    """
    ahead = top_a - top_b
    less = tl.exp(-tl.abs(ahead))
    weight_a = tl.where(ahead >= 0, 1.0, less)
    weight_b = tl.where(ahead >= 0, less, 1.0)
    moved_a = moment_a + sum_a * tl.minimum(ahead, 0.0)
    moved_b = moment_b + sum_b * tl.minimum(-ahead, 0.0)
    return (
        tl.maximum(top_a, top_b),
        weight_a * sum_a + weight_b * sum_b,
        weight_a * moved_a + weight_b * moved_b,
    )


@jit
def numbers_of_a_row(
    logits_RV: tl.tensor,
    target_R: tl.tensor,
    logprob_R: tl.tensor,
    total_R: tl.tensor,
    entropy_R: tl.tensor,
    inner: tl.tensor,
    outer: tl.tensor,
    CAPPED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # row * VOCABULARY passes 2^31
    logits_V = logits_RV + row * VOCABULARY
    lane = tl.arange(0, BLOCK)
    # every lane keeps a set of its own: threads wait for each other once a row, not once a block
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    moment = tl.full([BLOCK], 0.0, tl.float32)
    for first in tl.range(0, VOCABULARY, BLOCK, num_stages=LOADS_AHEAD):
        place = first + lane
        inside = place < VOCABULARY
        z, _ = formed(tl.load(logits_V + place, mask=inside, other=0.0), inner, outer, CAPPED)
        top, total, moment = merged(top, total, moment, tl.where(inside, z, LOWEST), 1.0, 0.0)
    top, total, moment = tl.reduce((top, total, moment), 0, merged)
    target = tl.load(target_R + row)
    known = (target >= 0) & (target < VOCABULARY)
    z, _ = formed(tl.load(logits_V + target, mask=known, other=float("nan")), inner, outer, CAPPED)
    spread = tl.log(total)
    tl.store(logprob_R + row, z - top - spread)
    tl.store(total_R + row, top + spread)
    tl.store(entropy_R + row, spread - moment / total)


@jit
def gradient_of_a_block(
    logits_RV: tl.tensor,
    target_R: tl.tensor,
    total_R: tl.tensor,
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
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < VOCABULARY
    logit = tl.load(logits_RV + row * VOCABULARY + place, mask=inside, other=0.0)
    z, slope = formed(logit, inner, outer, CAPPED)
    logprob = z - tl.load(total_R + row)
    probability = tl.exp(logprob)
    chosen = tl.where(place == tl.load(target_R + row), 1.0, 0.0)
    gradient = tl.load(logprob_gradient_R + row) * (chosen - probability)
    if ENTROPY:
        gradient -= tl.load(entropy_gradient_R + row) * probability * (logprob + tl.load(entropy_R + row))
    gradient = (gradient * slope).to(gradient_RV.dtype.element_ty)
    tl.store(gradient_RV + row * VOCABULARY + place, gradient, mask=inside)


def row_numbers(
    logits_RV: Tensor,
    target_R: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    inner: float,
    outer: float,
    capped: bool,
) -> None:
    """Writes each row's log-prob of the target, log of the sum of exp(z), and entropy; reads the logits once."""
    rows, vocabulary = logits_RV.shape
    numbers_of_a_row[(rows,)](
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
    numbers: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    out_RV: Tensor,
    *,
    inner: float,
    outer: float,
    capped: bool,
    entropy_gradient: bool,
) -> None:
    """Writes the loss's gradient in the logits, given their rows' numbers (total, entropy), and the loss's gradients
    in log-prob and entropy."""
    rows, vocabulary = logits_RV.shape
    block = block_of(vocabulary)
    gradient_of_a_block[(rows, triton.cdiv(vocabulary, block))](
        logits_RV,
        target_R,
        *numbers,
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
