"""Attention as an argument: transformers' modules call back into whatever `attend` object the caller passed along.

The trainer passes PackedAttention, the native rollout engine passes one that reads its key-value cache. The modules
themselves stay as they are.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rloom.transfer import send

NAME = "rloom"  # what `config._attn_implementation` says
# Newer versions of torch want to be told that several heads share a key; older ones just do it.
SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Form(NamedTuple):
    """What a family adds to plain attention."""

    scale: float
    window: int | None = None  # how many tokens back a token sees, itself included
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)


class Attend(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        """[rows, heads, tokens, size] each, packed samples being one row -> [rows, tokens, heads, size]

        Called once a layer, in order. Which layer it is, is not said: a compiled layer would then be compiled anew for
        each of them.
        """

    def restart(self) -> None:
        """The pass begins again with the first layer."""


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
    return attend(query, key, value, Form(scaling, sliding_window, softcap)), None


AttentionInterface.register(NAME, call_attend)


class PackedAttention:
    """Causal attention within each of the samples laid end to end in one row of tokens."""

    def __init__(self, length_N: Tensor, device: torch.device) -> None:
        """`length_N` on the host: sizes are read off it there, and nothing waits for the device."""
        tokens, self.samples, self.longest = int(length_N.sum()), len(length_N), int(length_N.max())
        length_N = send(length_N, device)
        end_N = torch.cumsum(length_N, 0)
        rows_N = torch.arange(self.samples, device=device)
        self.row_T = torch.repeat_interleave(rows_N, length_N, output_size=tokens)
        self.column_T = torch.arange(tokens, device=device) - (end_N - length_N)[self.row_T]
        self.boundaries = torch.nn.functional.pad(end_N, (1, 0)).int()  # 0, the end of the first sample, ...

    @property
    def position_T(self) -> Tensor:
        return self.column_T

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        # in float32 there is no such kernel, and none of them knows a softcap
        if query.is_cuda and form.softcap is None and value.dtype in (torch.bfloat16, torch.float16):
            return self.varlen(query, key, value, form)
        rows = attend_causally(self.spread(query), self.spread(key), self.spread(value), form)
        return rows.transpose(1, 2)[self.row_T, self.column_T].unsqueeze(0)

    def restart(self) -> None:
        """All layers are the same to it."""

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        """Torch's own kernel for samples laid end to end."""
        out = varlen_attn(
            query[0].transpose(0, 1).to(value.dtype),
            key[0].transpose(0, 1).to(value.dtype),
            value[0].transpose(0, 1),
            self.boundaries,
            self.boundaries,
            self.longest,
            self.longest,
            scale=form.scale,
            window_size=(-1 if form.window is None else form.window - 1, 0),
            **SHARED_KEYS,
        )
        assert isinstance(out, Tensor)  # nothing beside it was asked for
        return out.unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """[1, heads, tokens, size] -> [samples, heads, longest, size]; causality hides what pads the end of a row."""
        _, heads, _, size = packed.shape
        rows = packed.new_zeros(self.samples, self.longest, heads, size)
        rows[self.row_T, self.column_T] = packed[0].transpose(0, 1)
        return rows.transpose(1, 2)


class RowsAttention:
    """Causal attention within each row of a batch that is padded at the end; causality hides the padding."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        return attend_causally(query, key, value, form).transpose(1, 2)

    def restart(self) -> None:
        """All layers are the same to it."""


class Opaque:
    """Stands for an attention that a compiler must not look into: one that writes to a cache and counts its layers.

    Compiled layers call `rloom::attend`; at run time that calls what `attending` was given.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        out: Tensor = attend_as_told(query, key, value, form.scale, form.window, form.softcap)
        return out

    def restart(self) -> None:
        TOLD[-1].restart()

    @contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        TOLD.append(attend)
        try:
            yield
        finally:
            TOLD.pop()


TOLD: list[Attend] = []  # the last one counts


@torch.library.custom_op("rloom::attend", mutates_args=())
def attend_as_told(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    return TOLD[-1](query, key, value, Form(scale, window, softcap))


@attend_as_told.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    rows, heads, tokens, size = query.shape
    return value.new_empty(rows, tokens, heads, size)


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
