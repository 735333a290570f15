"""Attention as an argument: transformers' modules call back into whatever `attend` object the caller passed along.

The trainer passes PackedAttention, the native rollout engine passes one that reads its key-value cache. The modules
themselves stay as they are.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "rloom"  # what `config._attn_implementation` says


class Form(NamedTuple):
    """What a family adds to plain attention."""

    scale: float
    window: int | None = None  # how many tokens back a token sees, itself included
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)


class Attend(Protocol):
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        """[rows, heads, tokens, size] each, packed samples being one row -> [rows, tokens, heads, size]"""


def call_attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; `attend` travels through the model's keyword arguments."""
    layer: Any = module.layer_idx
    return attend(layer, query, key, value, Form(scaling, sliding_window, softcap)), None


AttentionInterface.register(NAME, call_attend)


class PackedAttention:
    """Causal attention within each of the samples laid end to end in one row of tokens."""

    def __init__(self, length_N: Tensor) -> None:
        samples, longest = len(length_N), int(length_N.max())
        self.row_T = torch.repeat_interleave(torch.arange(samples, device=length_N.device), length_N)
        start_N = torch.cumsum(length_N, 0) - length_N
        self.column_T = torch.arange(len(self.row_T), device=length_N.device) - start_N[self.row_T]
        self.shape = (samples, longest)

    @property
    def position_T(self) -> Tensor:
        return self.column_T

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        rows = attend_causally(self.spread(query), self.spread(key), self.spread(value), form)
        return rows.transpose(1, 2)[self.row_T, self.column_T].unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """[1, heads, tokens, size] -> [samples, heads, longest, size]; causality hides what pads the end of a row."""
        _, heads, _, size = packed.shape
        rows = packed.new_zeros(*self.shape, heads, size)
        rows[self.row_T, self.column_T] = packed[0].transpose(0, 1)
        return rows.transpose(1, 2)


class RowsAttention:
    """Causal attention within each row of a batch that is padded at the end; causality hides the padding."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        return attend_causally(query, key, value, form).transpose(1, 2)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
    """[rows, heads, length, size] each; every token sees itself and what is before it, `window` tokens at most."""
    length = query.shape[2]
    if form.softcap is None and (form.window is None or length <= form.window):
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=form.scale, enable_gqa=gqa)
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place[None, :]
    return attend_where(query, key, value, (distance >= 0) & (distance < (form.window or length)), form)


def attend_where(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, form: Form) -> Tensor:
    """Attention under an explicit mask (True: seen)."""
    groups = query.shape[1] // key.shape[1]
    if form.softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=form.scale, enable_gqa=groups > 1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    score = form.softcap * torch.tanh(query @ key.transpose(-1, -2) * (form.scale / form.softcap))
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1, dtype=torch.float32)
    return weight.to(value.dtype) @ value
