"""Choosing the next token and noting it down. B rows, V vocabulary, J blocks of it.

Same choice as `sampler.choose`: where the running sum of probabilities passes a uniform number. The logits are read
once for the sums of each block, and once more only in the block where the sum passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rloom.rollout.native.slots import MOST_STOP_IDS, Slots

BLOCK = 4096


def sample_and_record(logits_PV: Tensor, source_B: Tensor, slot_B: Tensor, slots: Slots) -> None:
    """The next token of each row, drawn from the distribution `source_B` names, written to the row's slot."""
    sources, vocabulary = logits_PV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    threshold_P = logits_PV.new_empty(sources, dtype=torch.float32)
    sums = logits_PV.new_empty((3, sources, blocks), dtype=torch.float32)  # highest, mass of all, mass of what is kept
    best = logits_PV.new_empty((sources, blocks), dtype=torch.int32)
    cut_kernel[(sources,)](logits_PV, threshold_P, slots.settings, vocabulary, BLOCK=BLOCK, num_warps=8)
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
def ordered(x):
    """A float32's bits as an integer of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def count_and_mass(logits, row, vocabulary, inverse, maximum, above, BLOCK: tl.constexpr):
    """How many tokens of a row lie at `above` or higher, and their mass over exp(highest)."""
    count = tl.zeros([], tl.int32)
    mass = tl.zeros([], tl.float32)
    for at in range(0, vocabulary, BLOCK):
        token = at + tl.arange(0, BLOCK)
        z = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        z = z * inverse
        kept = (ordered(z) >= above) & (token < vocabulary)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(z - maximum), 0.0), 0)
    return count, mass


@triton.jit
def cut_kernel(logits, threshold_P, settings, vocabulary, BLOCK: tl.constexpr):
    """The lowest logit that top-k and then top-p leave in, found by bisection over the numbers a float32 can be."""
    row = tl.program_id(0).to(tl.int64)
    inverse, greedy = tl.load(settings), tl.load(settings + 1)
    top_p, top_k = tl.load(settings + 2), tl.load(settings + 3).to(tl.int32)
    by_count, by_mass = (top_k > 0) & (top_k < vocabulary), top_p < 1.0
    lowest = tl.full([], -2147483648, tl.int64)
    if (greedy == 0.0) & (by_count | by_mass):
        maximum = tl.full([], float("-inf"), tl.float32)
        for at in range(0, vocabulary, BLOCK):
            token = at + tl.arange(0, BLOCK)
            z = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
            maximum = tl.maximum(maximum, tl.max(z.to(tl.float32) * inverse, 0))
        top = ordered(maximum).to(tl.int64)
        if by_count:  # the highest bound that leaves top_k tokens or more
            high = top + 1
            for _ in range(33):
                middle = (lowest + high) >> 1
                count, _mass = count_and_mass(logits, row, vocabulary, inverse, maximum, middle.to(tl.int32), BLOCK)
                lowest, high = tl.where(count >= top_k, middle, lowest), tl.where(count >= top_k, high, middle)
        if by_mass:  # the lowest bound above which less than top_p of what is left lies
            _count, whole = count_and_mass(logits, row, vocabulary, inverse, maximum, lowest.to(tl.int32), BLOCK)
            low, high = lowest - 1, top
            for _ in range(33):
                middle = (low + high) >> 1
                above = (middle + 1).to(tl.int32)
                _count, mass = count_and_mass(logits, row, vocabulary, inverse, maximum, above, BLOCK)
                inside = mass < top_p * whole
                low, high = tl.where(inside, low, middle), tl.where(inside, middle, high)
            lowest = high
    bits = lowest.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bound = bits.to(tl.float32, bitcast=True)
    tl.store(threshold_P + row, tl.where(lowest == -2147483648, float("-inf"), bound))


@triton.jit
def sum_kernel(
    logits, threshold_P, sums, best, settings, sources, vocabulary, blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one block of one row: the highest logit and where it is, and the masses relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse, threshold = tl.load(settings), tl.load(threshold_P + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    z = z * inverse
    maximum = tl.max(z, 0)
    mass = tl.exp(z - tl.where(maximum == float("-inf"), 0.0, maximum))
    place = row * blocks + block
    tl.store(sums + place, maximum)
    tl.store(sums + sources * blocks + place, tl.sum(mass, 0))
    tl.store(sums + 2 * sources * blocks + place, tl.sum(tl.where(z >= threshold, mass, 0.0), 0))
    tl.store(best + place, block * BLOCK + tl.argmax(z, 0))


@triton.jit
def draw_kernel(
    logits, threshold_P, sums, best, settings, source_B, slot_B,
    uniform, tokens, logprobs, token_S, written_S, limit_S, stopped_S, done_S,
    stop_ids, sources, vocabulary, blocks, longest_answer,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source, slot = tl.load(source_B + row).to(tl.int64), tl.load(slot_B + row).to(tl.int64)
    written, going = tl.load(written_S + slot), tl.load(done_S + slot) == 0
    inverse, greedy = tl.load(settings), tl.load(settings + 1)
    threshold = tl.load(threshold_P + source)

    block = tl.arange(0, BLOCKS)
    place, real = source * blocks + block, block < blocks
    highest_J = tl.load(sums + place, mask=real, other=float("-inf"))
    maximum = tl.max(highest_J, 0)
    factor_J = tl.exp(highest_J - maximum)
    whole = tl.sum(factor_J * tl.load(sums + sources * blocks + place, mask=real, other=0.0), 0)
    kept_J = factor_J * tl.load(sums + 2 * sources * blocks + place, mask=real, other=0.0)
    passed_J = tl.cumsum(kept_J, 0)

    draws = tl.load(uniform + slot * longest_answer + written, mask=going, other=0.0)
    # all from the one running sum: added in another order it would round otherwise, and the aim fall between two blocks
    aim = draws * tl.max(passed_J, 0)
    last_block = tl.sum((passed_J < tl.max(passed_J, 0)).to(tl.int32), 0)
    chosen_block = tl.minimum(tl.sum((passed_J <= aim).to(tl.int32), 0), last_block)
    aim = tl.maximum(aim - tl.max(tl.where(block < chosen_block, passed_J, 0.0), 0), 0.0)

    token = chosen_block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + source * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    z = z * inverse
    mass = tl.where(z >= threshold, tl.exp(z - maximum), 0.0)
    passed = tl.cumsum(mass, 0)
    last = tl.sum((passed < tl.max(passed, 0)).to(tl.int32), 0)
    drawn = chosen_block * BLOCK + tl.minimum(tl.sum((passed <= aim).to(tl.int32), 0), last)
    best_block = tl.argmax(highest_J, 0)
    choice = tl.where(greedy > 0.0, tl.load(best + source * blocks + best_block), drawn).to(tl.int32)

    logit = tl.load(logits + source * vocabulary + choice).to(tl.float32) * inverse
    tl.store(tokens + slot * longest_answer + written, choice, mask=going)
    tl.store(logprobs + slot * longest_answer + written, logit - maximum - tl.log(whole), mask=going)
    tl.store(token_S + slot, choice, mask=going)
    stop = tl.sum((tl.load(stop_ids + tl.arange(0, STOPS)) == choice).to(tl.int32), 0) > 0
    tl.store(stopped_S + slot, stop.to(tl.int32), mask=going)
    tl.store(done_S + slot, (stop | (written + 1 >= tl.load(limit_S + slot))).to(tl.int32), mask=going)
    tl.store(written_S + slot, written + 1, mask=going)
