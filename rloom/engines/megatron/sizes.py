"""The sizes of a model, and how the ranks of a Megatron engine divide it. Imports neither torch nor megatron-core."""

from dataclasses import dataclass
from typing import Any

from rloom.engines.kinds import MEGATRON_FAMILIES
from rloom.errors import ModelError


@dataclass(frozen=True)
class ModelParallel:
    tensor: int = 1  # ranks that divide each matrix
    pipeline: int = 1  # stages: ranks that hold consecutive layers
    expert: int = 1  # ranks that divide the experts of a layer
    expert_tensor: int | None = None  # ranks that divide the matrices of an expert; None: `tensor`
    sequence: bool = True  # between the matrices, each rank of `tensor` holds a slice of the tokens

    @property
    def replica(self) -> int:
        """Ranks that hold one copy of the model (without its experts)."""
        return self.tensor * self.pipeline

    @property
    def slices_tokens(self) -> bool:
        return self.sequence and self.tensor > 1

    def rank_of(self, worker: int, workers: int) -> int:
        """The rank in the process group of a worker of the pool.

        The workers of a replica are consecutive, since they get the same samples. megatron-core numbers ranks by the
        tensor, then the data-parallel, then the pipeline dimension.
        """
        copies = workers // self.replica
        copy, within = divmod(worker, self.replica)
        stage, part = divmod(within, self.tensor)
        return part + self.tensor * (copy + copies * stage)


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
