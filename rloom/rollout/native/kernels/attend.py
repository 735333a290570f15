"""One new token a sequence attends to its prompt and to what it has written, which lie in two stretches of the cache.

The prompt's stretch is shared by all sequences that start from it. B rows of the batch, each with a slot that says
where its two stretches are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rloom.models.attention import AttentionOptions
from rloom.rollout.native.slots import Slots

PROGRAMS = 512  # about four a multiprocessor of a large GPU: with fewer, a sequence is split among several
MOST_SPLITS = 16
BLOCK_BYTES = 16384  # keys at a time: with as many values, several blocks ahead, they fit the shared memory of any GPU


def attend_to_slots(
    query: Tensor,  # [B, heads, size]
    key: Tensor,  # [B, key heads, size], of the new token
    value: Tensor,
    keys: Tensor,  # [key heads, places, size], one layer of the cache
    values: Tensor,
    slot_B: Tensor,
    slots: Slots,
    options: AttentionOptions,
) -> Tensor:
    """[B, heads, size of a value]; the new keys and values are written to the cache on the way."""
    rows, heads, size = query.shape
    key_heads, value_size = key.shape[1], value.shape[2]
    # a matrix product has 16 columns at least
    padded, value_padded = (max(16, triton.next_power_of_2(one)) for one in (size, value_size))
    block = min(128, max(16, BLOCK_BYTES // (padded * keys.element_size())))
    splits = max(1, min(MOST_SPLITS, PROGRAMS // (rows * key_heads)))
    out = value.new_empty(rows, heads, value_size)
    partial = value.new_empty((splits, rows, heads, value_size), dtype=torch.float32) if splits > 1 else out
    weight = value.new_empty((splits, 2, rows, heads), dtype=torch.float32) if splits > 1 else out
    attend_kernel[(rows, key_heads, splits)](
        query, key, value, keys, values, query if options.sinks is None else options.sinks, partial, weight,
        slot_B, slots.prompt_start, slots.prompt_length, slots.own_start, slots.written,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), rows, heads, size, value_size,
        options.scale, options.window or 0, options.softcap or 0.0,
        GROUP=heads // key_heads, GROUP_PADDED=max(16, triton.next_power_of_2(heads // key_heads)),
        SIZE=padded, VALUE_SIZE=value_padded, BLOCK=block, SPLITS=splits, WINDOW=options.window is not None,
        SOFTCAP=options.softcap is not None, SINKS=options.sinks is not None, PRECISION="ieee",
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(rows, heads)](
            partial, weight, out, rows, heads, value_size, SPLITS=splits, SIZE=value_padded, num_warps=1
        )
    return out


@triton.jit
def attend_kernel(
    query, key, value, keys, values, sinks, partial, weight,
    slot_B, prompt_start_S, prompt_length_S, own_start_S, written_S,
    query_row, query_head, key_row, key_head, value_row, value_head,
    keys_head, keys_place, values_head, values_place, rows, heads, size, value_size,
    scale, window, softcap,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a row, a key head and the query heads that share it, and every SPLITS-th block of its tokens."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slot_B + row)
    prompt, prompt_length = tl.load(prompt_start_S + slot), tl.load(prompt_length_S + slot)
    own, before = tl.load(own_start_S + slot), tl.load(written_S + slot) - 1  # tokens of its own in the cache
    column, value_column, member = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE), tl.arange(0, GROUP_PADDED)
    real, value_real, there = column < size, value_column < value_size, member < GROUP
    q_place = row.to(tl.int64) * query_row + (head * GROUP + member[:, None]) * query_head + column[None, :]
    q = tl.load(query + q_place, mask=there[:, None] & real[None, :], other=0.0).to(keys.dtype.element_ty)
    new_key = tl.load(key + row.to(tl.int64) * key_row + head * key_head + column, mask=real, other=0.0)
    new_key = new_key.to(keys.dtype.element_ty)
    new_value = tl.load(
        value + row.to(tl.int64) * value_row + head * value_head + value_column, mask=value_real, other=0.0
    )
    keys += head.to(tl.int64) * keys_head
    values += head.to(tl.int64) * values_head
    first = split == 0
    new_place = (own + before).to(tl.int64)
    tl.store(keys + new_place * keys_place + column, new_key, mask=real & first)
    tl.store(values + new_place * values_place + value_column, new_value, mask=value_real & first)

    # the first split begins with the new token itself, which need not be read back
    score = capped(tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale, softcap, SOFTCAP)
    maximum, share, total = beside_sink(score, sinks + head * GROUP + member, there, SINKS)
    maximum, total = tl.where(first, maximum, float("-inf")), tl.where(first, total, 0.0)
    sums = tl.where(first, share, 0.0)[:, None] * new_value.to(tl.float32)[None, :]
    oldest = tl.maximum(prompt_length + before - window + 1, 0) if WINDOW else 0
    maximum, total, sums = attend_to_stretch(
        q, keys, values, prompt, oldest, prompt_length, split, maximum, total, sums,
        keys_place, values_place, size, value_size, scale, softcap,
        SIZE, VALUE_SIZE, BLOCK, SPLITS, SOFTCAP, PRECISION,
    )  # fmt: skip
    maximum, total, sums = attend_to_stretch(
        q, keys, values, own, tl.maximum(oldest - prompt_length, 0), before, split, maximum, total, sums,
        keys_place, values_place, size, value_size, scale, softcap,
        SIZE, VALUE_SIZE, BLOCK, SPLITS, SOFTCAP, PRECISION,
    )  # fmt: skip

    out_row = (split * rows + row).to(tl.int64) * heads + head * GROUP + member[:, None]
    out_place = out_row * value_size + value_column[None, :]
    keep = there[:, None] & value_real[None, :]
    if SPLITS == 1:
        tl.store(partial + out_place, (sums / total[:, None]).to(partial.dtype.element_ty), mask=keep)
    else:
        tl.store(partial + out_place, sums, mask=keep)
        note = (split * 2 * rows + row) * heads + head * GROUP + member
        tl.store(weight + note, maximum, mask=there)
        tl.store(weight + note + rows * heads, total, mask=there)


@triton.jit
def beside_sink(score, sink_place, there, SINKS: tl.constexpr):
    """(highest score, weight of the token, sum of weights) of one token and of its sink, which has no value."""
    maximum, share = score, tl.full(score.shape, 1.0, tl.float32)
    total = share
    if SINKS:
        sink = tl.load(sink_place, mask=there, other=float("-inf")).to(tl.float32)
        maximum = tl.maximum(score, sink)
        share = tl.exp(score - maximum)
        total = share + tl.exp(sink - maximum)
    return maximum, share, total


@triton.jit
def capped(score, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # softcap * tanh(score / softcap)
    return score


@triton.jit
def attend_to_stretch(
    q, keys, values, start, begin, length, split, maximum, total, sums,
    keys_place, values_place, size, value_size, scale, softcap,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add tokens begin to length - 1 of a stretch to: the highest score, the sum of weights, the sum of values."""
    column, value_column = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    for at in range(begin // BLOCK * BLOCK + split * BLOCK, length, SPLITS * BLOCK):
        token = at + tl.arange(0, BLOCK)
        seen = (token >= begin) & (token < length)
        place = (start + token).to(tl.int64)[:, None]
        k_there, v_there = (
            seen[:, None] & (column < size)[None, :],
            seen[:, None] & (value_column < value_size)[None, :],
        )
        k = tl.load(keys + place * keys_place + column[None, :], mask=k_there, other=0.0)
        v = tl.load(values + place * values_place + value_column[None, :], mask=v_there, other=0.0)
        score = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(maximum, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no NaN from inf - inf
        shrink, share = tl.exp(maximum - safe), tl.exp(score - safe[:, None])
        total = total * shrink + tl.sum(share, 1)
        sums = sums * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
        maximum = higher
    return maximum, total, sums


@triton.jit
def merge_kernel(partial, weight, out, rows, heads, size, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """Put the splits of a row's head together."""
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, SIZE)
    real = column < size
    maximum = tl.full([], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        maximum = tl.maximum(maximum, tl.load(weight + (split * 2 * rows + row) * heads + head))
    total = tl.zeros([], tl.float32)
    sums = tl.zeros([SIZE], tl.float32)
    for split in tl.static_range(SPLITS):
        note = (split * 2 * rows + row) * heads + head
        factor = tl.exp(tl.load(weight + note) - maximum)
        total += factor * tl.load(weight + note + rows * heads)
        place = ((split * rows + row).to(tl.int64) * heads + head) * size + column
        sums += factor * tl.load(partial + place, mask=real, other=0.0)
    out_place = (row.to(tl.int64) * heads + head) * size + column
    tl.store(out + out_place, (sums / total).to(out.dtype.element_ty), mask=real)
