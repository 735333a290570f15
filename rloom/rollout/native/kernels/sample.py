"""Sample the next tokens and record them in the slots. B rows, P distributions, V vocabulary, J blocks of it.

The result is that of `sampler.sample_tokens`: the first token whose cumulative probability exceeds a uniform number.
The logits are read once for the sums of each block, and once more only in the block that holds the sampled token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rloom.rollout.native.slots import MOST_STOP_IDS, Slots

BLOCK = 4096


def sample_and_record(logits_PV: Tensor, source_B: Tensor, slot_B: Tensor, slots: Slots) -> None:
    """Sample the next token of each row from distribution `source_B` and write it to the row's slot."""
    sources, vocabulary = logits_PV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    threshold_P = logits_PV.new_empty(sources, dtype=torch.float32)
    sums = logits_PV.new_empty((3, sources, blocks), dtype=torch.float32)  # maximum, mass, mass of kept tokens
    best = logits_PV.new_empty((sources, blocks), dtype=torch.int32)
    threshold_kernel[(sources,)](logits_PV, threshold_P, slots.settings, vocabulary, BLOCK=BLOCK, num_warps=8)
    sum_kernel[(sources, blocks)](
        logits_PV, threshold_P, sums, best, slots.settings, sources, vocabulary, blocks, BLOCK=BLOCK, num_warps=8
    )
    draw_kernel[(len(slot_B),)](
        logits_PV, threshold_P, sums, best, slots.settings, source_B, slot_B,
        slots.uniform, slots.tokens, slots.logprobs, slots.token, slots.written, slots.limit, slots.stopped, slots.done,
        slots.stop_ids, sources, vocabulary, blocks, slots.longest_answer,
        BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(blocks), STOPS=MOST_STOP_IDS, num_warps=8,
    )  # fmt: skip


@triton.jit
def sortable_bits(x):
    """The bits of a float32 as an integer with the same ordering."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def count_and_mass(logits, row, vocabulary, inverse, maximum, above, BLOCK: tl.constexpr):
    """The number of tokens of a row at `above` or higher, and the sum of their exp(z - maximum)."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float32)
    for first in range(0, vocabulary, BLOCK):
        token = first + tl.arange(0, BLOCK)
        z = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        z = z * inverse
        kept = (sortable_bits(z) >= above) & (token < vocabulary)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(z - maximum), 0.0), 0)
    return count, mass


@triton.jit
def threshold_kernel(logits, threshold_P, settings, vocabulary, BLOCK: tl.constexpr):
    """The lowest logit that top-k and then top-p keep, by bisection over the values of a float32."""
    row = tl.program_id(0).to(tl.int64)
    inverse, greedy = tl.load(settings), tl.load(settings + 1)
    top_p, top_k = tl.load(settings + 2), tl.load(settings + 3).to(tl.int32)
    by_count, by_mass = (top_k > 0) & (top_k < vocabulary), top_p < 1.0
    lowest = tl.full([], -2147483648, tl.int64)
    if (greedy == 0.0) & (by_count | by_mass):
        maximum = tl.full([], float("-inf"), tl.float32)
        for first in range(0, vocabulary, BLOCK):
            token = first + tl.arange(0, BLOCK)
            z = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
            maximum = tl.maximum(maximum, tl.max(z.to(tl.float32) * inverse, 0))
        top = sortable_bits(maximum).to(tl.int64)
        if by_count:  # the highest threshold that keeps at least top_k tokens
            high = top + 1
            for _ in range(33):
                middle = (lowest + high) >> 1
                count, _mass = count_and_mass(logits, row, vocabulary, inverse, maximum, middle.to(tl.int32), BLOCK)
                lowest, high = tl.where(count >= top_k, middle, lowest), tl.where(count >= top_k, high, middle)
        if by_mass:  # the lowest threshold above which less than top_p of the kept mass lies
            _count, total = count_and_mass(logits, row, vocabulary, inverse, maximum, lowest.to(tl.int32), BLOCK)
            low, high = lowest - 1, top
            for _ in range(33):
                middle = (low + high) >> 1
                above = (middle + 1).to(tl.int32)
                _count, mass = count_and_mass(logits, row, vocabulary, inverse, maximum, above, BLOCK)
                below = mass < top_p * total
                low, high = tl.where(below, low, middle), tl.where(below, middle, high)
            lowest = high
    bits = lowest.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bound = bits.to(tl.float32, bitcast=True)
    tl.store(threshold_P + row, tl.where(lowest == -2147483648, float("-inf"), bound))


@triton.jit
def sum_kernel(
    logits, threshold_P, sums, best, settings, sources, vocabulary, blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one block of a row: the maximum logit and its index, and the masses relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse, threshold = tl.load(settings), tl.load(threshold_P + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    z = z * inverse
    maximum = tl.max(z, 0)
    mass = tl.exp(z - tl.where(maximum == float("-inf"), 0.0, maximum))
    index = row * blocks + block
    tl.store(sums + index, maximum)
    tl.store(sums + sources * blocks + index, tl.sum(mass, 0))
    tl.store(sums + 2 * sources * blocks + index, tl.sum(tl.where(z >= threshold, mass, 0.0), 0))
    tl.store(best + index, block * BLOCK + tl.argmax(z, 0))


@triton.jit
def first_above(cumulative, mass, target, index, SIZE: tl.constexpr):
    """The index of the first element with a mass whose cumulative sum exceeds the target, or is the highest: rounding
    may leave none above it.

    Elements are not counted: a parallel scan adds each prefix in an order of its own, so that sums can also fall, and
    those of the padding behind the vocabulary with them.
    """
    has_mass = mass > 0.0
    highest = tl.max(tl.where(has_mass, cumulative, 0.0), 0)
    return tl.min(tl.where(has_mass & ((cumulative > target) | (cumulative == highest)), index, SIZE), 0)


@triton.jit
def draw_kernel(
    logits, threshold_P, sums, best, settings, source_B, slot_B,
    uniform, tokens, logprobs, token_S, written_S, limit_S, stopped_S, done_S,
    stop_ids, sources, vocabulary, blocks, longest_answer,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source, slot = tl.load(source_B + row).to(tl.int64), tl.load(slot_B + row).to(tl.int64)
    written, active = tl.load(written_S + slot), tl.load(done_S + slot) == 0
    inverse, greedy = tl.load(settings), tl.load(settings + 1)
    threshold = tl.load(threshold_P + source)

    block = tl.arange(0, BLOCKS)
    index, mask = source * blocks + block, block < blocks
    maximum_J = tl.load(sums + index, mask=mask, other=float("-inf"))
    maximum = tl.max(maximum_J, 0)
    factor_J = tl.exp(maximum_J - maximum)
    total = tl.sum(factor_J * tl.load(sums + sources * blocks + index, mask=mask, other=0.0), 0)
    kept_J = factor_J * tl.load(sums + 2 * sources * blocks + index, mask=mask, other=0.0)
    cumulative_J = tl.cumsum(kept_J, 0)

    draws = tl.load(uniform + slot * longest_answer + written, mask=active, other=0.0)
    # all from one cumulative sum: sums in another order round differently, and the target could fall between blocks
    target = draws * tl.max(cumulative_J, 0)
    chosen_block = first_above(cumulative_J, kept_J, target, block, BLOCKS)
    target = tl.maximum(target - tl.max(tl.where(block < chosen_block, cumulative_J, 0.0), 0), 0.0)

    member = tl.arange(0, BLOCK)
    token = chosen_block * BLOCK + member
    z = tl.load(logits + source * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    z = z * inverse
    mass = tl.where(z >= threshold, tl.exp(z - maximum), 0.0)
    drawn = chosen_block * BLOCK + first_above(tl.cumsum(mass, 0), mass, target, member, BLOCK)
    best_block = tl.argmax(maximum_J, 0)
    sampled = tl.where(greedy > 0.0, tl.load(best + source * blocks + best_block), drawn).to(tl.int32)
    sampled = tl.minimum(sampled, vocabulary - 1)  # logits that are NaN have no maximum and no mass

    logit = tl.load(logits + source * vocabulary + sampled).to(tl.float32) * inverse
    tl.store(tokens + slot * longest_answer + written, sampled, mask=active)
    tl.store(logprobs + slot * longest_answer + written, logit - maximum - tl.log(total), mask=active)
    tl.store(token_S + slot, sampled, mask=active)
    stop = tl.sum((tl.load(stop_ids + tl.arange(0, STOPS)) == sampled).to(tl.int32), 0) > 0
    tl.store(stopped_S + slot, stop.to(tl.int32), mask=active)
    tl.store(done_S + slot, (stop | (written + 1 >= tl.load(limit_S + slot))).to(tl.int32), mask=active)
    tl.store(written_S + slot, written + 1, mask=active)
