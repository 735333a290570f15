"""A key-value cache indexed by token, and its attentions for prefill and decode.

The tokens of a prompt are contiguous and shared by all its answers; an answer's own tokens are contiguous, too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.models.attention import AttentionOptions, PackedAttention
from rloom.rollout.native.arena import Arena
from rloom.rollout.native.slots import Slots


class MixedLayerShapes(Exception):
    """The model's layers differ in heads or sizes, which one TokenCache does not support."""


@dataclass(frozen=True)
class TokenShape:
    """The shape of one token's keys and values in the cache."""

    layers: int
    heads: int
    key_size: int
    value_size: int  # smaller than key_size in DeepSeek
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.layers * self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


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

    def shape(self) -> TokenShape:
        if len(set(self.shapes)) != 1:
            sizes = sorted({one[:3] for one in self.shapes})
            raise MixedLayerShapes(f"this model's layers have different caches, (heads, key, value size): {sizes}")
        return TokenShape(len(self.shapes), *self.shapes[0])


class TokenCache:
    """Keys and values, [layers, heads, capacity_tokens + 1 spare, size] each, in memory that `sleep` frees."""

    def __init__(self, shape: TokenShape, capacity_tokens: int, device: torch.device) -> None:
        self.shape, self.capacity_tokens = shape, capacity_tokens
        size = shape.bytes * (capacity_tokens + 1)
        self.arena = Arena(size, device) if device.type == "cuda" else None
        memory = self.arena.tensor()[:size] if self.arena is not None else torch.zeros(size, dtype=torch.uint8)
        sizes = [shape.layers * shape.heads * (capacity_tokens + 1) * one for one in (shape.key_size, shape.value_size)]
        keys, values = memory.view(shape.dtype).split(sizes)
        self.keys = keys.view(shape.layers, shape.heads, capacity_tokens + 1, shape.key_size)
        self.values = values.view(shape.layers, shape.heads, capacity_tokens + 1, shape.value_size)

    @property
    def bytes(self) -> int:
        """Memory in use now."""
        return self.shape.bytes * self.capacity_tokens if self.arena is None or self.arena.mapped else 0

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
    """Causal attention of packed prompts, which writes their keys and values to the cache."""

    def __init__(self, length_P: Tensor, start_P: Tensor, cache: TokenCache) -> None:
        super().__init__(length_P, start_P.device)
        self.cache, self.layer = cache, -1
        self.index_T = start_P[self.row_T] + self.column_T

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

    def __init__(self, cache: TokenCache, slots: Slots, slot_B: Tensor) -> None:
        self.cache, self.slots, self.slot_B, self.layer = cache, slots, slot_B, -1

    def reset(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        from rloom.rollout.native.kernels.attend import attend_to_slots  # imports triton

        self.layer += 1
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        rows = [part[0].transpose(0, 1) for part in (query, key, value)]
        return attend_to_slots(rows[0], rows[1], rows[2], keys, values, self.slot_B, self.slots, options).unsqueeze(0)
