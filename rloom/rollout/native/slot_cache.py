"""A key-value cache with one slot per running sequence, and its attentions for prefill and decode.

S slots, B running sequences (always slots 0..B-1), T tokens of packed prompts.
"""

import torch
from torch import Tensor

from rloom.models.attention import AttentionOptions, PackedAttention, attend_with_mask
from rloom.models.routing import RoutingRecord, RoutingShape


class SlotCache:
    """Keys and values of every layer, [slots, key-value heads, length, size] each, allocated at the first write.

    Also the experts of each token, [slots, length, layers, experts], if routing is recorded.
    """

    def __init__(self, slots: int, length: int, routing: RoutingShape | None = None) -> None:
        self.slots, self.length, self.routing = slots, length, routing
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.experts: Tensor | None = None

    def reserve(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Allocate a layer from the shapes of its first keys and values; layers come in order.

        Keys are stored in the dtype of the values: if the rotary embedding returns float32 keys, attention would cast
        all of them to bfloat16 at every step.
        """
        if layer == len(self.keys):
            # zeros, since masked values are still multiplied, and 0 * NaN is NaN
            for cache, tensor in ((self.keys, key), (self.values, value)):
                cache.append(value.new_zeros(self.slots, tensor.shape[1], self.length, tensor.shape[3]))

    def move(self, source: Tensor, target: Tensor) -> None:
        for layer in (*self.keys, *self.values, *([] if self.experts is None else [self.experts])):
            layer[target] = layer[source]

    def new_record(self, tokens: int, device: torch.device) -> RoutingRecord | None:
        """For a pass of so many tokens."""
        if self.routing is None:
            return None
        if self.experts is None:
            self.experts = torch.zeros(self.slots, self.length, *self.routing, dtype=torch.int16, device=device)
        return RoutingRecord(tokens, self.routing, device)


class PrefillAttention(PackedAttention):
    """Causal attention of packed prompts, which writes keys and values to every slot that starts from the prompt."""

    def __init__(self, length_P: Tensor, cache: SlotCache, slot_S: Tensor, prompt_S: Tensor) -> None:
        super().__init__(length_P, slot_S.device)
        self.cache, self.layer = cache, -1
        self.slot_S, self.prompt_S = slot_S, prompt_S  # slot slot_S[i] starts from prompt prompt_S[i]

    def reset(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.layer += 1
        layer, longest = self.layer, self.longest
        self.cache.reserve(layer, key, value)
        self.cache.keys[layer][self.slot_S, :, :longest] = self.pad_samples(key.to(value.dtype))[self.prompt_S]
        self.cache.values[layer][self.slot_S, :, :longest] = self.pad_samples(value)[self.prompt_S]
        return super().__call__(query, key, value, options)

    def write_experts(self, experts_TMK: Tensor) -> None:
        assert self.cache.experts is not None
        rows = experts_TMK.new_zeros(self.samples, self.longest, *experts_TMK.shape[1:])
        rows[self.row_T, self.column_T] = experts_TMK
        self.cache.experts[self.slot_S, : self.longest] = rows[self.prompt_S]


class DecodeAttention:
    """The new token of each sequence attends to its slot."""

    def __init__(self, cache: SlotCache, position_B: Tensor) -> None:
        self.cache, self.layer = cache, -1
        self.position_B = position_B
        self.row_B = torch.arange(len(position_B), device=position_B.device)
        self.longest = int(position_B.max()) + 1
        self.distance = position_B[:, None] - torch.arange(self.longest, device=position_B.device)

    def reset(self) -> None:
        self.layer = -1

    def write_experts(self, experts_BMK: Tensor) -> None:
        assert self.cache.experts is not None
        self.cache.experts[self.row_B, self.position_B] = experts_BMK

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.layer += 1
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        keys[self.row_B, :, self.position_B] = key[0].transpose(0, 1).to(keys.dtype)
        values[self.row_B, :, self.position_B] = value[0].transpose(0, 1)
        sequences, key_heads, size = len(self.row_B), keys.shape[1], query.shape[-1]
        # query heads become queries of the key head they share, so that keys are not repeated
        queries = query[0].transpose(0, 1).reshape(sequences, key_heads, -1, size)
        mask = (self.distance >= 0) & (self.distance < (options.window or self.longest))
        rows = attend_with_mask(
            queries,
            keys[:sequences, :, : self.longest],
            values[:sequences, :, : self.longest],
            mask[:, None, None, :],
            options,
        )
        return rows.reshape(1, sequences, -1, values.shape[-1])
