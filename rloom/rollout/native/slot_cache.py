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

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first tokens of a slot to another one."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :tokens] = layer[source, :, :tokens]
        if self.experts is not None:
            self.experts[target, :tokens] = self.experts[source, :tokens]

    def new_record(self, tokens: int, device: torch.device) -> RoutingRecord | None:
        """For a pass of so many tokens."""
        if self.routing is None:
            return None
        if self.experts is None:
            self.experts = torch.zeros(self.slots, self.length, *self.routing, dtype=torch.int16, device=device)
        return RoutingRecord(tokens, self.routing, device)


class PrefillAttention(PackedAttention):
    """Causal attention of packed prompts, which writes keys and values to every slot that starts from the prompt.

    The slot of a continued sequence has the first `reused_P` tokens already. The others also attend to them.
    """

    def __init__(self, length_P: Tensor, reused_P: Tensor, cache: SlotCache, slot_S: Tensor, prompt_S: Tensor) -> None:
        """Slot `slot_S[i]` starts from prompt `prompt_S[i]`. W: tokens that are written, to all slots together."""
        super().__init__(length_P, slot_S.device)
        self.cache, self.layer = cache, -1
        self.reused_P, self.longest_context = reused_P.to(slot_S.device), int((length_P + reused_P).max())
        self.continues = bool(reused_P.any())
        self.slot_P = torch.empty_like(self.reused_P)
        self.slot_P[prompt_S] = slot_S  # one of those that start from the prompt
        written = PackedAttention(length_P[prompt_S.cpu()], slot_S.device)
        prompt_W = prompt_S[written.row_T]
        self.source_W = self.cu_seqlens[prompt_W] + written.column_T
        self.slot_W, self.position_W = slot_S[written.row_T], self.reused_P[prompt_W] + written.column_T

    @property
    def position_T(self) -> Tensor:
        return self.column_T + self.reused_P[self.row_T]

    def reset(self) -> None:
        self.layer = -1

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.layer += 1
        self.cache.reserve(self.layer, key, value)
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        keys[self.slot_W, :, self.position_W] = key[0].transpose(0, 1)[self.source_W].to(keys.dtype)
        values[self.slot_W, :, self.position_W] = value[0].transpose(0, 1)[self.source_W]
        if not self.continues:
            return super().__call__(query, key, value, options)
        longest = self.longest_context
        mask = continued_mask(self.reused_P, self.longest, longest, options.window)
        context = keys[self.slot_P, :, :longest], values[self.slot_P, :, :longest]
        rows = attend_with_mask(self.pad_samples(query), *context, mask, options)
        return rows.transpose(1, 2)[self.row_T, self.column_T].unsqueeze(0)

    def write_experts(self, experts_TMK: Tensor) -> None:
        assert self.cache.experts is not None
        self.cache.experts[self.slot_W, self.position_W] = experts_TMK[self.source_W]


def continued_mask(reused_P: Tensor, new: int, context: int, window: int | None) -> Tensor:
    """[P, 1, new tokens, tokens of the context]: to which tokens the new ones attend, after `reused_P` in the cache."""
    query = reused_P[:, None] + torch.arange(new, device=reused_P.device)
    distance = query[:, :, None] - torch.arange(context, device=reused_P.device)
    return ((distance >= 0) & (distance < (window or context)))[:, None]


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
