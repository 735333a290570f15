"""Decode attention: the new token of a sequence attends to its prompt and to its own tokens, in pages of the cache.

The pages of a prompt are shared by all sequences that start from it. B rows of the batch; the slot of a row holds the
lengths, and the page table the pages: those of the prompt, then its own. A block of tokens is in one page.

A program reads a part of one sequence. The parts of all sequences are about equal, so that a few long sequences among
short ones do not hold up a step: a long one is divided into up to MOST_SPLITS parts, a short one may have one part. The
program that finishes last merges the parts of its sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rloom.models.attention import AttentionOptions
from rloom.rollout.native.page_table import PageTable
from rloom.rollout.native.slots import MOST_PROGRAMS, Slots

PROGRAMS = 512  # the parts of all sequences: about four per multiprocessor of a large GPU
MOST_SPLITS = 16  # of at most MOST_PROGRAMS programs that are started; those without a part end at once
BLOCK_BYTES = 16384  # of keys per block; with the values and prefetching this fits any GPU's shared memory


def attend_to_slots(
    query: Tensor,  # [B, heads, size]
    key: Tensor,  # [B, key heads, size], of the new token
    value: Tensor,
    keys: Tensor,  # [key heads, cache tokens, size], one layer of the cache
    values: Tensor,
    slot_B: Tensor,
    slots: Slots,
    table: PageTable,
    options: AttentionOptions,
) -> Tensor:
    """[B, heads, size of a value]; also writes the new keys and values to the cache."""
    rows, heads, size = query.shape
    key_heads, value_size = key.shape[1], value.shape[2]
    # tl.dot requires at least 16 columns
    padded, value_padded = (max(16, triton.next_power_of_2(one)) for one in (size, value_size))
    block = min(table.page_tokens, max(16, BLOCK_BYTES // (padded * keys.element_size())))
    splits = max(1, min(MOST_SPLITS, MOST_PROGRAMS // (rows * key_heads)))
    out = value.new_empty(rows, heads, value_size)
    partial = value.new_empty((splits, rows, heads, value_size), dtype=torch.float32) if splits > 1 else out
    weight = value.new_empty((splits, 2, rows, heads), dtype=torch.float32) if splits > 1 else out
    attend_kernel[(rows, key_heads, splits)](
        query, key, value, keys, values, query if options.sinks is None else options.sinks, out, partial, weight,
        slots.arrived, slot_B, slots.prompt_length, slots.earlier, slots.written, slots.batch_tokens, table.pages,
        table.width, query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), rows, heads, size, value_size,
        options.scale, options.window or 0, options.softcap or 0.0, PROGRAMS,
        GROUP=heads // key_heads, GROUP_PADDED=max(16, triton.next_power_of_2(heads // key_heads)),
        SIZE=padded, VALUE_SIZE=value_padded, BLOCK=block, PAGE=table.page_tokens, MERGES=splits > 1,
        WINDOW=options.window is not None, SOFTCAP=options.softcap is not None, SINKS=options.sinks is not None,
        PRECISION="ieee", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def attend_kernel(
    query, key, value, keys, values, sinks, out, partial, weight, arrived,
    slot_B, prompt_length_S, earlier_S, written_S, batch_tokens, page_table, table_width,
    query_row, query_head, key_row, key_head, value_row, value_head,
    keys_head, keys_token, values_head, values_token, rows, heads, size, value_size,
    scale, window, softcap, programs,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, MERGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a row, a key head and the query heads that share it, and every n-th block of its tokens, in n
    parts."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slot_B + row)
    pages = page_table + slot * table_width
    prompt_length = tl.load(prompt_length_S + slot)
    before = tl.load(earlier_S + slot) + tl.load(written_S + slot) - 1  # own tokens in the cache
    oldest = tl.maximum(prompt_length + before - window + 1, 0) if WINDOW else 0
    parts = parts_of(prompt_length + before - oldest, batch_tokens, programs) if MERGES else 1
    if split >= parts:
        return
    column, value_column, member = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE), tl.arange(0, GROUP_PADDED)
    column_mask, value_mask, head_mask = column < size, value_column < value_size, member < GROUP
    q_offset = row.to(tl.int64) * query_row + (head * GROUP + member[:, None]) * query_head + column[None, :]
    q = tl.load(query + q_offset, mask=head_mask[:, None] & column_mask[None, :], other=0.0).to(keys.dtype.element_ty)
    new_key = tl.load(key + row.to(tl.int64) * key_row + head * key_head + column, mask=column_mask, other=0.0)
    new_key = new_key.to(keys.dtype.element_ty)
    new_value = tl.load(
        value + row.to(tl.int64) * value_row + head * value_head + value_column, mask=value_mask, other=0.0
    )
    keys += head.to(tl.int64) * keys_head
    values += head.to(tl.int64) * values_head
    first = split == 0
    new_page = tl.load(pages + tl.cdiv(prompt_length, PAGE) + before // PAGE).to(tl.int64)
    new_index = new_page * PAGE + before % PAGE
    tl.store(keys + new_index * keys_token + column, new_key, mask=column_mask & first)
    tl.store(values + new_index * values_token + value_column, new_value, mask=value_mask & first)

    # the first split starts from the new token, which is in registers
    score = capped(tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale, softcap, SOFTCAP)
    maximum, share, total = with_sink(score, sinks + head * GROUP + member, head_mask, SINKS)
    maximum, total = tl.where(first, maximum, float("-inf")), tl.where(first, total, 0.0)
    sums = tl.where(first, share, 0.0)[:, None] * new_value.to(tl.float32)[None, :]
    maximum, total, sums = attend_to_pages(
        q, keys, values, pages, oldest, prompt_length, before, split, parts, maximum, total, sums,
        keys_token, values_token, size, value_size, scale, softcap,
        SIZE, VALUE_SIZE, BLOCK, PAGE, SOFTCAP, PRECISION,
    )  # fmt: skip

    head_index = head * GROUP + member
    out_offset = (row.to(tl.int64) * heads + head_index[:, None]) * value_size + value_column[None, :]
    keep = head_mask[:, None] & value_mask[None, :]
    if MERGES and parts > 1:
        counter = arrived + row * tl.num_programs(1) + head
        place = partial, weight, row, rows, heads, value_size, head_index, head_mask, out_offset, keep
        if stored(place, split, maximum, total, sums, counter) < parts - 1:
            return
        tl.store(counter, 0)
        total, sums = merged(place, parts)
    tl.store(out + out_offset, (sums / total[:, None]).to(out.dtype.element_ty), mask=keep)


@triton.jit
def parts_of(tokens, batch_tokens, programs):
    """Programs that share the cached tokens of a sequence."""
    part_tokens = tl.maximum(tl.load(batch_tokens) * tl.num_programs(1) // programs, 1).to(tl.int32)
    parts = tl.maximum((tokens + part_tokens // 2) // part_tokens, 1)  # rounded
    return tl.minimum(parts, tl.num_programs(2))


@triton.jit
def with_sink(score, sink_pointer, head_mask, SINKS: tl.constexpr):
    """(maximum score, weight of the token, sum of weights) of a token and its sink, which has no value."""
    maximum, share = score, tl.full(score.shape, 1.0, tl.float32)
    total = share
    if SINKS:
        sink = tl.load(sink_pointer, mask=head_mask, other=float("-inf")).to(tl.float32)
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
def attend_to_pages(
    q, keys, values, pages, oldest, prompt_length, own_length, split, parts, maximum, total, sums,
    keys_token, values_token, size, value_size, scale, softcap,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the tokens from position `oldest` on to the maximum score, the sum of weights and the sum of values.

    Blocks of the prompt and own ones are read in one loop, so that loads are prefetched across the two.
    """
    column, value_column = tl.arange(0, SIZE), tl.arange(0, VALUE_SIZE)
    column_mask, value_mask = column < size, value_column < value_size
    prompt_first, own_first = oldest // BLOCK, tl.maximum(oldest - prompt_length, 0) // BLOCK
    prompt_pages = tl.cdiv(prompt_length, PAGE)
    prompt_blocks = tl.maximum(tl.cdiv(prompt_length, BLOCK) - prompt_first, 0)
    blocks = prompt_blocks + tl.cdiv(own_length, BLOCK) - own_first
    for i in range(split, blocks, parts):
        is_own = i >= prompt_blocks
        block_start = tl.where(is_own, own_first + i - prompt_blocks, prompt_first + i) * BLOCK
        length, begin = tl.where(is_own, own_length, prompt_length), tl.where(is_own, oldest - prompt_length, oldest)
        page = tl.load(pages + tl.where(is_own, prompt_pages, 0) + block_start // PAGE).to(tl.int64)
        token = block_start + tl.arange(0, BLOCK)
        token_mask = (token >= begin) & (token < length)
        index = (page * PAGE + block_start % PAGE + tl.arange(0, BLOCK))[:, None]
        k_mask, v_mask = token_mask[:, None] & column_mask[None, :], token_mask[:, None] & value_mask[None, :]
        k = tl.load(keys + index * keys_token + column[None, :], mask=k_mask, other=0.0)
        v = tl.load(values + index * values_token + value_column[None, :], mask=v_mask, other=0.0)
        score = capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
        score = tl.where(token_mask[None, :], score, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(score, 1))
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # no token so far: avoids NaN from inf - inf
        rescale, share = tl.exp(maximum - safe), tl.exp(score - safe[:, None])
        total = total * rescale + tl.sum(share, 1)
        sums = sums * rescale[:, None] + tl.dot(share.to(v.dtype), v, input_precision=PRECISION)
        maximum = new_maximum
    return maximum, total, sums


@triton.jit
def stored(place, part, maximum, total, sums, counter):
    """Store a part of a row, and count it: how many of the row's parts were stored before it."""
    partial, weight, row, rows, heads, value_size, head_index, head_mask, out_offset, keep = place
    tl.store(partial + part.to(tl.int64) * rows * heads * value_size + out_offset, sums, mask=keep)
    offset = (part * 2 * rows + row) * heads + head_index
    tl.store(weight + offset, maximum, mask=head_mask)
    tl.store(weight + offset + rows * heads, total, mask=head_mask)
    tl.debug_barrier()  # all of its threads have stored
    return tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def merged(place, parts):
    """(sum of weights, sum of values) over the parts of a row. `.cg`: not from a cache that other programs bypass."""
    partial, weight, row, rows, heads, value_size, head_index, head_mask, out_offset, keep = place
    maximum = tl.full(head_index.shape, float("-inf"), tl.float32)
    total = tl.zeros(head_index.shape, tl.float32)
    sums = tl.zeros(out_offset.shape, tl.float32)
    for part in range(parts):
        offset = (part * 2 * rows + row) * heads + head_index
        part_maximum = tl.load(weight + offset, mask=head_mask, other=0.0, cache_modifier=".cg")
        part_total = tl.load(weight + offset + rows * heads, mask=head_mask, other=1.0, cache_modifier=".cg")
        part_offset = tl.full([], part, tl.int64) * rows * heads * value_size + out_offset
        part_sums = tl.load(partial + part_offset, mask=keep, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, part_maximum)
        rescale, factor = tl.exp(maximum - new_maximum), tl.exp(part_maximum - new_maximum)
        total = total * rescale + part_total * factor
        sums = sums * rescale[:, None] + part_sums * factor[:, None]
        maximum = new_maximum
    return total, sums
