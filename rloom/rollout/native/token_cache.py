"""Keys and values of single tokens, each at a place of its own, and the two ways of attending over them.

A prompt's tokens lie side by side and are shared by all answers to it; an answer's own tokens lie side by side too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.models.attention import Form, PackedAttention
from rloom.rollout.native.arena import Arena
from rloom.rollout.native.slots import Slots


class UnlikeLayers(Exception):
    """The model's layers differ in heads or size, or are not what its configuration says: no one cache fits them."""


@dataclass(frozen=True)
class TokenShape:
    """What one token takes in the cache."""

    layers: int
    heads: int
    size: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return 2 * self.layers * self.heads * self.size * self.dtype.itemsize


class TokenCache:
    """[layers, 2, heads, places and a spare one, size], in memory that can be given back and taken again."""

    def __init__(self, shape: TokenShape, places: int, device: torch.device) -> None:
        self.shape, self.places = shape, places
        size = shape.bytes * (places + 1)
        self.arena = Arena(size, device) if device.type == "cuda" else None
        whole = self.arena.tensor()[:size] if self.arena is not None else torch.zeros(size, dtype=torch.uint8)
        self.layers = whole.view(shape.dtype).view(shape.layers, 2, shape.heads, places + 1, shape.size)

    @property
    def bytes(self) -> int:
        """Held now."""
        return self.shape.bytes * self.places if self.arena is None or self.arena.mapped else 0

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
    """Packed prompts attend to themselves; their keys and values go to the cache."""

    def __init__(self, length_P: Tensor, start_P: Tensor, cache: TokenCache) -> None:
        super().__init__(length_P, start_P.device)
        self.cache, self.layer = cache, -1
        self.place_T = start_P[self.row_T] + self.column_T

    def restart(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        self.layer += 1
        shape = self.cache.shape
        if self.layer == shape.layers or {key.shape[1::2], value.shape[1::2]} != {(shape.heads, shape.size)}:
            raise UnlikeLayers(
                f"layer {self.layer} of this model has keys of {tuple(key.shape[1::2])} and values of "
                f"{tuple(value.shape[1::2])} (heads, size), its configuration says {shape.layers} layers of "
                f"{(shape.heads, shape.size)}"
            )
        keys, values = self.cache.layers[self.layer]
        keys[:, self.place_T] = key[0].to(keys.dtype)
        values[:, self.place_T] = value[0]
        return super().__call__(query, key, value, form)


class AnswerAttention:
    """One new token a row attends to its prompt and to what it has written."""

    def __init__(self, cache: TokenCache, slots: Slots, slot_B: Tensor) -> None:
        self.cache, self.slots, self.slot_B, self.layer = cache, slots, slot_B, -1

    def restart(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        from rloom.rollout.native.kernels.attend import attend_to_slots  # triton, where it is needed

        self.layer += 1
        keys, values = self.cache.layers[self.layer]
        rows = [part[0].transpose(0, 1) for part in (query, key, value)]
        return attend_to_slots(rows[0], rows[1], rows[2], keys, values, self.slot_B, self.slots, form).unsqueeze(0)
