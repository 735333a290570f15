"""The sizes of a model, from its Hugging Face configuration, for the families that the Megatron engine supports."""

from dataclasses import dataclass
from typing import Any

from rloom.engines.kinds import MEGATRON_FAMILIES
from rloom.errors import ModelError


@dataclass(frozen=True)
class Experts:
    count: int
    per_token: int
    ffn: int  # rows of an expert's up projection
    normalized: bool  # the probabilities of a token's experts add up to 1


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_size: int
    ffn: int
    vocabulary: int
    epsilon: float  # added to the variance in the norms
    qkv_bias: bool
    qk_norm: bool
    tied: bool  # the head's weight is the embedding's
    windows: tuple[int | None, ...]  # one for each layer's attention; None: no sliding window
    experts: Experts | None = None

    @property
    def query_heads_per_group(self) -> int:
        return self.heads // self.groups


def shape_of(config: Any, *, key: str, has_vocabulary_head: bool = True) -> Shape:
    """`config`: transformers' configuration of the model. `key`: of the strategy, for error messages."""
    family = config.model_type
    if family not in MEGATRON_FAMILIES:
        raise ModelError(f"{key}=megatron: it supports {', '.join(MEGATRON_FAMILIES)}, not {family}; use fsdp2")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ModelError(f"{key}=megatron: {name}=true in config.json is not supported; use fsdp2")
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tied=bool(config.tie_word_embeddings) and has_vocabulary_head,
        windows=tuple(window(config, layer) for layer in range(config.num_hidden_layers)),
        experts=experts_of(config, key),
    )


def window(config: Any, layer: int) -> int | None:
    types = getattr(config, "layer_types", None)
    if types is not None and types[layer] != "sliding_attention":
        return None
    size: int | None = getattr(config, "sliding_window", None)
    return size


def experts_of(config: Any, key: str) -> Experts | None:
    if config.model_type == "mixtral":
        return Experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, True)
    if config.model_type != "qwen3_moe":
        return None
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        raise ModelError(f"{key}=megatron: a model with experts in some layers only is not supported; use fsdp2")
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob)
    )
