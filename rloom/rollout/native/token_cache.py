"""A key-value cache of pages, and its attentions for prefill and decode.

The pages of a prompt are shared by all its answers. An answer's own tokens begin in a page of their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.models.attention import AttentionOptions, PackedAttention, attend_with_mask, has_varlen_kernel
from rloom.models.routing import RoutingShape
from rloom.rollout.native.arena import Arena
from rloom.rollout.native.page_table import PageTable
from rloom.rollout.native.slot_cache import continued_mask
from rloom.rollout.native.slots import Slots
from rloom.transfer import send


class MixedLayerShapes(Exception):
    """The model's layers differ in heads or sizes, which one TokenCache does not support."""


@dataclass(frozen=True)
class TokenShape:
    """The shape of one token's keys and values in the cache, and of its experts where they are recorded."""

    layers: int
    heads: int
    key_size: int
    value_size: int  # smaller than key_size in DeepSeek
    dtype: torch.dtype
    routing: RoutingShape | None = None
    pads_prefill: bool = False  # some layer has no kernel for packed samples

    @property
    def key_value_bytes(self) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return self.key_value_bytes + (0 if self.routing is None else self.routing.bytes)


class ShapeProbe:
    """An attention that only records shapes. One token through the model gives its TokenShape."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int, torch.dtype]] = []  # of each layer
        self.pads_prefill = False

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.shapes.append((key.shape[1], key.shape[3], value.shape[3], value.dtype))
        self.pads_prefill |= not has_varlen_kernel(query, value, options)
        rows, heads, tokens, _ = query.shape
        return value.new_zeros(rows, tokens, heads, value.shape[3])

    def reset(self) -> None:
        self.shapes.clear()

    def shape(self, routing: RoutingShape | None = None) -> TokenShape:
        if len(set(self.shapes)) != 1:
            sizes = sorted({one[:3] for one in self.shapes})
            raise MixedLayerShapes(f"this model's layers have different caches, (heads, key, value size): {sizes}")
        return TokenShape(len(self.shapes), *self.shapes[0], routing, self.pads_prefill)


class TokenCache:
    """Keys and values, [layers, heads, tokens of all pages and of a spare one, size], in memory that `sleep` frees.

    Also the experts of each token, [tokens, layers, experts], if routing is recorded: answers share their prompt's.
    """

    def __init__(self, shape: TokenShape, pages: int, page_tokens: int, device: torch.device) -> None:
        self.shape, self.pages, self.page_tokens = shape, pages, page_tokens
        tokens = (pages + 1) * page_tokens
        size = shape.bytes * tokens
        self.arena = Arena(size, device) if device.type == "cuda" else None
        memory = self.arena.tensor()[:size] if self.arena is not None else torch.zeros(size, dtype=torch.uint8)
        sizes = [shape.layers * shape.heads * tokens * one for one in (shape.key_size, shape.value_size)]
        key_value_bytes = shape.key_value_bytes * tokens
        keys, values = memory[:key_value_bytes].view(shape.dtype).split(sizes)
        self.keys = keys.view(shape.layers, shape.heads, tokens, shape.key_size)
        self.values = values.view(shape.layers, shape.heads, tokens, shape.value_size)
        self.experts: Tensor | None = None
        if shape.routing is not None:
            self.experts = memory[key_value_bytes:].view(torch.int16).view(tokens, *shape.routing)

    @property
    def capacity_tokens(self) -> int:
        return self.pages * self.page_tokens

    @property
    def bytes(self) -> int:
        """Memory in use now."""
        tokens = (self.pages + 1) * self.page_tokens
        return self.shape.bytes * tokens if self.arena is None or self.arena.mapped else 0

    def wake(self) -> None:
        if self.arena is not None:
            self.arena.map()

    def sleep(self) -> None:
        if self.arena is not None:
            self.arena.unmap()

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()


class PromptAttention(PackedAttention):
    """Causal attention of packed prompts, and of resumed answers, which writes keys and values to the cache.

    The first `reused_P` tokens of a continued sequence are in the cache. The others also attend to them.
    """

    def __init__(
        self,
        length_P: Tensor,  # of the new tokens
        reused_P: Tensor,
        slot_P: Tensor,
        cache: TokenCache,
        slots: Slots,
        table: PageTable,
    ) -> None:
        super().__init__(length_P, slot_P.device)
        self.cache, self.layer = cache, -1
        self.context = PackedAttention(length_P + reused_P, slot_P.device) if reused_P.any() else None
        self.reused_P = send(reused_P, slot_P.device)
        slot_T = slot_P[self.row_T]
        self.index_T = table.places(slot_T, self.position_T, slots.prompt_length[slot_T])
        if self.context is not None:
            slot_T = slot_P[self.context.row_T]
            self.context_index = table.places(slot_T, self.context.column_T, slots.prompt_length[slot_T])

    @property
    def position_T(self) -> Tensor:
        return self.column_T if self.context is None else self.column_T + self.reused_P[self.row_T]

    def reset(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.layer += 1
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        keys[:, self.index_T] = key[0].to(keys.dtype)
        values[:, self.index_T] = value[0]
        if self.context is None:
            return super().__call__(query, key, value, options)
        key, value = keys[None, :, self.context_index], values[None, :, self.context_index]
        if has_varlen_kernel(query, value, options):
            return self.varlen(query, key, value, options, self.context)
        mask = continued_mask(self.reused_P, self.longest, self.context.longest, options.window)
        padded = self.context.pad_samples(key), self.context.pad_samples(value)
        rows = attend_with_mask(self.pad_samples(query), *padded, mask, options)
        return rows.transpose(1, 2)[self.row_T, self.column_T].unsqueeze(0)


class AnswerAttention:
    """The new token of each row attends to its prompt and to the answer so far."""

    def __init__(self, cache: TokenCache, slots: Slots, table: PageTable, slot_B: Tensor) -> None:
        self.cache, self.slots, self.table, self.slot_B, self.layer = cache, slots, table, slot_B, -1

    def reset(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        from rloom.rollout.native.kernels.attend import attend_to_slots  # imports triton

        self.layer += 1
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        new = [part[0].transpose(0, 1) for part in (query, key, value)]
        rows = attend_to_slots(new[0], new[1], new[2], keys, values, self.slot_B, self.slots, self.table, options)
        return rows.unsqueeze(0)
