"""Attention as an argument: transformers' modules call the `attend` object that the caller passes to the model.

The trainer passes PackedAttention, the native rollout engine one that uses its key-value cache; the modules stay
unmodified. Layers may be compiled, and torch.compile guards on their arguments: a layer index, or an object that holds
one, would be recompiled for each layer. So the native engine passes all layers one stateless OpaqueAttention, which
calls the custom op `rloom::attend`. The compiler does not trace into the op, and an op takes only tensors and numbers:
it reads the attention of the running pass from the module-level stack ACTIVE (`with active(attend)`), and an attention
with a cache finds the layer by counting its calls.
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

NAME = "rloom"  # the value of `config._attn_implementation`
# Newer versions of torch require this argument for grouped-query attention; older ones do not have it.
GQA_ARGUMENT: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
# Arguments of transformers' attention functions that do not change what a causal, packed or cached attention computes.
IGNORED_ARGUMENTS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
)


class AttentionOptions(NamedTuple):
    """What a model family adds to plain attention."""

    scale: float
    window: int | None = None  # size of a sliding window: a token attends to so many tokens, itself included
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: Tensor | None = None  # [heads], a score per head that enters the softmax without a value (gpt-oss)


class Attend(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """[rows, heads, tokens, size] each -> [rows, tokens, heads, size of a value]; packed samples are one row.

        Called once per layer, in the order of the layers.
        """

    def reset(self) -> None:
        """The next call is the first layer's: the pass is run again from its beginning."""


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
    """The function registered with transformers; `attend` is a keyword argument of the model's forward."""
    if attend is None:
        attend = current_attention(module)
    check_arguments(module, attention_mask, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query, key, value, AttentionOptions(scale, sliding_window, softcap, s_aux)), None


def check_arguments(module: torch.nn.Module, attention_mask: Tensor | None, others: dict[str, Any]) -> None:
    """Refuse arguments that this attention does not implement, rather than ignore them."""
    unknown = [name for name, value in others.items() if value is not None and name not in IGNORED_ARGUMENTS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if "is_causal" in unknown and others["is_causal"] is True:
        unknown.remove("is_causal")
    if "dropout" in unknown and not (others["dropout"] and module.training):
        unknown.remove("dropout")
    if unknown:
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which rloom's does not support"
        )


AttentionInterface.register(NAME, call_attend)
ACTIVE: list[Attend] = []  # the running pass's: for OpaqueAttention, and for layers that drop keyword arguments


@contextmanager
def active(attend: Attend) -> Iterator[None]:
    ACTIVE.append(attend)
    try:
        yield
    finally:
        ACTIVE.pop()


def current_attention(module: torch.nn.Module) -> Attend:
    if not ACTIVE:
        raise ModelError(f"{type(module).__name__} was called outside of Decoder, with rloom's attention set")
    return ACTIVE[-1]


class PackedAttention:
    """Causal attention within each of the samples packed in one row of tokens."""

    def __init__(self, length_N: Tensor, device: torch.device) -> None:
        """`length_N` is on the host: reading sizes from it needs no device synchronisation."""
        tokens, self.samples, self.longest = int(length_N.sum()), len(length_N), int(length_N.max())
        length_N = send(length_N, device)
        end_N = torch.cumsum(length_N, 0)
        rows_N = torch.arange(self.samples, device=device)
        self.row_T = torch.repeat_interleave(rows_N, length_N, output_size=tokens)
        self.column_T = torch.arange(tokens, device=device) - (end_N - length_N)[self.row_T]
        self.cu_seqlens = torch.nn.functional.pad(end_N, (1, 0)).int()  # [0, end of sample 0, end of sample 1, ...]

    @property
    def position_T(self) -> Tensor:
        return self.column_T

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        if has_varlen_kernel(query, value, options):
            return self.varlen(query, key, value, options)
        rows = attend_causally(self.pad_samples(query), self.pad_samples(key), self.pad_samples(value), options)
        return rows.transpose(1, 2)[self.row_T, self.column_T].unsqueeze(0)

    def reset(self) -> None:
        """It keeps no state between layers."""

    def varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
        keys: "PackedAttention | None" = None,  # lengths of the keys, where samples have more keys than queries
    ) -> Tensor:
        """Torch's kernel for packed samples. The queries of a sample are those of its last tokens."""
        keys = self if keys is None else keys
        size = value.shape[-1]
        # the kernel requires one size for keys and values, a multiple of 8
        padded_size = -(-max(key.shape[-1], size) // 8) * 8
        query, key, value = (pad_heads(tensor.to(value.dtype), padded_size) for tensor in (query, key, value))
        out = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.cu_seqlens,
            keys.cu_seqlens,
            self.longest,
            keys.longest,
            scale=options.scale,
            window_size=(-1 if options.window is None else options.window - 1, 0),
            **GQA_ARGUMENT,
        )
        assert isinstance(out, Tensor)  # no auxiliary output was requested
        return (out if size == padded_size else out[..., :size]).unsqueeze(0)

    def pad_samples(self, packed: Tensor) -> Tensor:
        """[1, heads, tokens, size] -> [samples, heads, longest, size], padded at the end, which causality masks."""
        _, heads, _, size = packed.shape
        rows = packed.new_zeros(self.samples, self.longest, heads, size)
        rows[self.row_T, self.column_T] = packed[0].transpose(0, 1)
        return rows.transpose(1, 2)


def has_varlen_kernel(query: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """varlen_attn has no float32 kernel, no softcap, and no gradient for sinks."""
    plain = options.softcap is None and options.sinks is None
    return query.is_cuda and plain and value.dtype in (torch.bfloat16, torch.float16)


def pad_heads(tensor: Tensor, size: int) -> Tensor:
    """Pad each head with zeros, which change neither the products of queries and keys nor the sums of values."""
    return tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1]))


class PaddedAttention:
    """Causal attention within each row of a batch that is padded at the end; causality masks the padding."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return attend_causally(query, key, value, options).transpose(1, 2)

    def reset(self) -> None:
        """It keeps no state between layers."""


class OpaqueAttention:
    """Calls the active attention through the custom op `rloom::attend`, which torch.compile does not trace into."""

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
    """[rows, heads, length, size] each; a token attends to itself and to earlier ones, `window` tokens at most."""
    length = query.shape[2]
    if options.softcap is None and options.sinks is None and (options.window is None or length <= options.window):
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scale, enable_gqa=gqa)
    position = torch.arange(length, device=query.device)
    distance = position[:, None] - position[None, :]
    return attend_with_mask(query, key, value, (distance >= 0) & (distance < (options.window or length)), options)


def attend_with_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attention under an explicit mask (True: attend)."""
    groups = query.shape[1] // key.shape[1]
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=options.scale, enable_gqa=groups > 1
        )
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    score = query @ key.transpose(-1, -2) * options.scale
    if options.softcap is not None:
        score = options.softcap * torch.tanh(score / options.softcap)
    score = score.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sink = options.sinks.to(score.dtype).reshape(1, score.shape[1], -1, 1).expand(*score.shape[:3], 1)
        score = torch.cat([score, sink], -1)
    weight = score.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
    return weight.to(value.dtype) @ value
