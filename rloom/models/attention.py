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
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from rloom.errors import ModelError
from rloom.transfer import send

NAME = "rloom"  # what `config._attn_implementation` says
# Newer versions of torch want to be told that several heads share a key; older ones just do it.
SHARED_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# Arguments of transformers' attention functions that do not change what a causal, packed or cached attention computes.
WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)


class AttentionOptions(NamedTuple):
    """What a family adds to plain attention."""

    scale: float
    window: int | None = None  # how many tokens back a token sees, itself included
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: Tensor | None = None  # [heads], a score each that takes part in the softmax and has no value (gpt-oss)


class Attend(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """[rows, heads, tokens, size] each, packed samples being one row -> [rows, tokens, heads, size of a value]

        Called once a layer, in order. Which layer it is, is not said: a compiled layer would then be compiled anew for
        each of them.
        """

    def reset(self) -> None:
        """The pass begins again with the first layer."""


def call_attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers; `attend` travels through the model's keyword arguments."""
    if attend is None:
        attend = current_attention(module)
    check_arguments(module, attention_mask, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, AttentionOptions(scale, sliding_window, softcap, s_aux)), None


def check_arguments(module: torch.nn.Module, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    """An argument that is not understood would be left out of the result without a word."""
    unknown = [name for name, value in others.items() if value is not None and name not in WITHOUT_EFFECT]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if "is_causal" in unknown and others["is_causal"] is True:
        unknown.remove("is_causal")
    if "dropout" in unknown and not (others["dropout"] and module.training):
        unknown.remove("dropout")
    if unknown:
        raise ModelError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which rloom's own does not have"
        )


AttentionInterface.register(NAME, call_attend)
ACTIVE: list[Attend] = []  # for families whose layers do not pass keyword arguments on to their attention


@contextmanager
def active(attend: Attend) -> Iterator[None]:
    ACTIVE.append(attend)
    try:
        yield
    finally:
        ACTIVE.pop()


def current_attention(module: torch.nn.Module) -> Attend:
    if not ACTIVE:
        raise ModelError(f"{type(module).__name__} was called outside of rloom, with rloom's attention set")
    return ACTIVE[-1]


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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        # in float32 there is no such kernel, and none of them has a softcap or the gradient of sinks
        plain = options.softcap is None and options.sinks is None
        if query.is_cuda and plain and value.dtype in (torch.bfloat16, torch.float16):
            return self.varlen(query, key, value, options)
        rows = attend_causally(self.spread(query), self.spread(key), self.spread(value), options)
        return rows.transpose(1, 2)[self.row_T, self.column_T].unsqueeze(0)

    def reset(self) -> None:
        """All layers are the same to it."""

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Torch's own kernel for samples laid end to end."""
        size = value.shape[-1]
        # it wants one size for keys and values, a multiple of 8
        wanted = -(-max(key.shape[-1], size) // 8) * 8
        query, key, value = (widened(tensor.to(value.dtype), wanted) for tensor in (query, key, value))
        out = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.boundaries,
            self.boundaries,
            self.longest,
            self.longest,
            scale=options.scale,
            window_size=(-1 if options.window is None else options.window - 1, 0),
            **SHARED_KEYS,
        )
        assert isinstance(out, Tensor)  # nothing beside it was asked for
        return (out if size == wanted else out[..., :size]).unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """[1, heads, tokens, size] -> [samples, heads, longest, size]; causality hides what pads the end of a row."""
        _, heads, _, size = packed.shape
        rows = packed.new_zeros(self.samples, self.longest, heads, size)
        rows[self.row_T, self.column_T] = packed[0].transpose(0, 1)
        return rows.transpose(1, 2)


def widened(tensor: Tensor, size: int) -> Tensor:
    """With zeros at the end of each head: they change no product of queries and keys, and no sum of values."""
    return tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1]))


class PaddedAttention:
    """Causal attention within each row of a batch that is padded at the end; causality hides the padding."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return attend_causally(query, key, value, options).transpose(1, 2)

    def reset(self) -> None:
        """All layers are the same to it."""


class OpaqueAttention:
    """Stands for an attention that a compiler must not look into: one that writes to a cache and counts its layers.

    Compiled layers call `rloom::attend`; at run time that calls the attention that is `running`.
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        out: Tensor = attend_with_active(
            query, key, value, options.scale, options.window, options.softcap, options.sinks
        )
        return out

    def reset(self) -> None:
        ACTIVE[-1].reset()


@torch.library.custom_op("rloom::attend", mutates_args=())
def attend_with_active(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    return ACTIVE[-1](query, key, value, AttentionOptions(scale, window, softcap, sinks))


@attend_with_active.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, tokens, _ = query.shape
    return value.new_empty(rows, tokens, heads, value.shape[-1])


def attend_causally(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """[rows, heads, length, size] each; every token sees itself and what is before it, `window` tokens at most."""
    length = query.shape[2]
    if options.softcap is None and options.sinks is None and (options.window is None or length <= options.window):
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scale, enable_gqa=gqa)
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place[None, :]
    return attend_where(query, key, value, (distance >= 0) & (distance < (options.window or length)), options)


def attend_where(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, options: AttentionOptions) -> Tensor:
    """Attention under an explicit mask (True: seen)."""
    groups = query.shape[1] // key.shape[1]
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=options.scale, enable_gqa=groups > 1
        )
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    score = query @ key.transpose(-1, -2) * options.scale
    if options.softcap is not None:
        score = options.softcap * torch.tanh(score / options.softcap)
    score = score.masked_fill(~seen, float("-inf"))
    if options.sinks is not None:
        sink = options.sinks.to(score.dtype).reshape(1, score.shape[1], -1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, sink], -1)
    weight = score.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return weight.to(value.dtype) @ value
