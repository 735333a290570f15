"""A key-value cache of pages, and its attentions for prefill and decode.

The pages of a prompt are shared by all its answers. An answer's own tokens begin in a page of their own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.models.attention import AttentionOptions, PackedAttention
from rloom.models.routing import RoutingShape
from rloom.rollout.native.arena import Arena
from rloom.rollout.native.page_table import PageTable
from rloom.rollout.native.slots import Slots


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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.shapes.append((key.shape[1], key.shape[3], value.shape[3], value.dtype))
        rows, heads, tokens, _ = query.shape
        return value.new_zeros(rows, tokens, heads, value.shape[3])

    def reset(self) -> None:
        self.shapes.clear()

    def shape(self, routing: RoutingShape | None = None) -> TokenShape:
        if len(set(self.shapes)) != 1:
            sizes = sorted({one[:3] for one in self.shapes})
            raise MixedLayerShapes(f"this model's layers have different caches, (heads, key, value size): {sizes}")
        return TokenShape(len(self.shapes), *self.shapes[0], routing)


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
    """Causal attention of packed prompts, and of resumed answers, which writes keys and values to the cache."""

    def __init__(self, length_P: Tensor, slot_P: Tensor, cache: TokenCache, slots: Slots, table: PageTable) -> None:
        super().__init__(length_P, slot_P.device)
        self.cache, self.layer = cache, -1
        slot_T = slot_P[self.row_T]
        self.index_T = table.places(slot_T, self.column_T, slots.prompt_length[slot_T])

    def reset(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.layer += 1
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        keys[:, self.index_T] = key[0].to(keys.dtype)
        values[:, self.index_T] = value[0]
        return super().__call__(query, key, value, options)


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
