"""The models of a run: size, trainable parameters, precision, and how ranks share them.

A model's size comes from its config.json: parameters, and what a token takes in training and in the cache. Only that
one file is read; nothing is downloaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.config.load import expand
from rloom.config.schema import Actor, Config, Critic, Fsdp, Model
from rloom.config.sections import EngineMemory, Megatron
from rloom.errors import ModelError
from rloom.models.source import ModelSource, UnknownSize, read_config
from rloom.plan.batches import Batches, Updates


@dataclass(frozen=True)
class FamilyDefaults:
    """Defaults of keys that a config.json may leave out, and what the code of a family fixes."""

    tied: bool = False  # default of tie_word_embeddings
    kv_heads: int | None = None  # default of num_key_value_heads; None: as many as heads
    head_size: int | None = None  # default of head_dim; None: hidden_size / heads
    qkv_bias: bool = False  # fixed; the key attention_bias adds biases to q, k, v and o
    norms: int = 2  # fixed: of the hidden size, in a layer
    head_norms: bool = False  # fixed: norms of queries and keys, of the head size


FAMILIES = {
    "llama": FamilyDefaults(),
    "mistral": FamilyDefaults(kv_heads=8),
    "qwen2": FamilyDefaults(kv_heads=32, qkv_bias=True),
    "qwen3": FamilyDefaults(kv_heads=32, head_size=128, head_norms=True),
    "gemma": FamilyDefaults(tied=True, kv_heads=16, head_size=256),
    "gemma2": FamilyDefaults(tied=True, kv_heads=4, head_size=256, norms=4),
    "gemma3_text": FamilyDefaults(tied=True, kv_heads=4, head_size=256, norms=4, head_norms=True),
}


@dataclass(frozen=True)
class Architecture:
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # one matrix is input and output embedding
    attention_bias: bool = False
    mlp_bias: bool = False
    context: int | None = None  # max_position_embeddings
    stored_bytes: int = 4  # of a weight in the model's files

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Numbers in the keys, or the values, of one token in one layer."""
        return self.kv_heads * self.head_size

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Linear maps of one layer: name -> (in, out)."""
        return {
            "q_proj": (self.hidden, self.query_size),
            "k_proj": (self.hidden, self.kv_size),
            "v_proj": (self.hidden, self.kv_size),
            "o_proj": (self.query_size, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer_parameters(self) -> int:
        family = FAMILIES[self.family]
        numbers = sum(rows * columns for rows, columns in self.matrices.values())
        biases = 0
        if family.qkv_bias or self.attention_bias:
            biases += self.query_size + 2 * self.kv_size
        if self.attention_bias:
            biases += self.hidden
        if self.mlp_bias:
            biases += 2 * self.intermediate + self.hidden
        return numbers + biases + self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of the norms of one layer."""
        family = FAMILIES[self.family]
        return family.norms * self.hidden + (2 * self.head_size if family.head_norms else 0)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Outside the layers: embeddings and the last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def critic_outer_parameters(self) -> int:
        """A critic's head has one output, and there is no output embedding."""
        return self.embedding + 2 * self.hidden

    @property
    def critic_parameters(self) -> int:
        return self.layers * self.layer_parameters + self.critic_outer_parameters

    @property
    def matrix_parameters(self) -> int:
        """Those that every token is multiplied with: an untied input embedding is only looked up."""
        return self.parameters - (0 if self.tied else self.embedding)

    @property
    def saved_numbers(self) -> int:
        """Numbers of one token that one compiled layer saves for the backward pass.

        The inputs of attention and of the MLP (2 hidden), queries and attention's output (2 query), keys and values
        (2 kv), gate and up (2 intermediate). Norms and the product of gate and up are recomputed.
        """
        return 2 * (self.hidden + self.query_size + self.kv_size + self.intermediate)

    def adapter_parameters(self, rank: int, targets: str | Sequence[str]) -> int:
        """Parameters of a LoRA adapter. `all-linear` leaves the output embedding out."""
        names = [targets] if isinstance(targets, str) else targets
        chosen = [size for name, size in self.matrices.items() if "all-linear" in names or name in names]
        return self.layers * sum(rank * (rows + columns) for rows, columns in chosen)


def read_architecture(source: ModelSource) -> Architecture:
    """The model of a folder, the embedded one, or that of a hub name whose config.json is in the cache already."""
    return architecture(read_config(source, download=False), f"{source.key}={source.path}")


def architecture(fields: Mapping[str, Any], source: str) -> Architecture:
    name = fields.get("model_type")
    if name not in FAMILIES:
        raise UnknownSize(
            f"{source}: its parameters cannot be counted from config.json (model_type {name!r}); "
            f"the families counted are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    try:
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        kv_heads = fields.get("num_key_value_heads", family.kv_heads)
        return Architecture(
            family=name,
            hidden=hidden,
            intermediate=fields["intermediate_size"],
            layers=fields["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads or heads,
            head_size=fields.get("head_dim") or family.head_size or hidden // heads,
            vocabulary=fields["vocab_size"],
            tied=fields.get("tie_word_embeddings", family.tied),
            attention_bias=name not in ("qwen2", "mistral") and fields.get("attention_bias", False),
            mlp_bias=name == "llama" and fields.get("mlp_bias", False),
            context=fields.get("max_position_embeddings"),
            stored_bytes=BFLOAT16 if fields.get("dtype", fields.get("torch_dtype")) in HALVES else FLOAT32,
        )
    except KeyError as error:
        raise ModelError(f"{source}: its config.json has no {error}; a {name} model's has") from error


FLOAT32, BFLOAT16 = 4, 2  # bytes of a number
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class ModelPlan:
    """The actor or the critic."""

    architecture: Architecture
    parameters: int  # with the adapter
    outer: int  # parameters outside the layers: embeddings, head, last norm
    trainable: int  # parameters: all, or the adapter's
    number_bytes: int  # bytes of a weight or an activation in the arithmetic
    checkpointing: bool
    keys: EngineMemory  # offload
    fsdp_size: int
    megatron: Megatron | None  # None: one process, or FSDP2
    ranks: int
    vocabulary: int  # rows of the head; 0 for a critic
    fused_head: bool
    updates: Updates
    stage: int = 0  # place in Megatron's pipeline

    @property
    def sharded(self) -> bool:
        """Several ranks have the FSDP2 engine or Megatron, one process the local one."""
        return self.ranks > 1

    @property
    def shards(self) -> int:
        """Ranks that hold one copy. 1 in one process."""
        return shards_of(self.fsdp_size, self.ranks) if self.megatron is None else self.megatron.model_ranks

    @property
    def copies(self) -> int:
        return self.ranks // self.shards

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.megatron is None or self.stage == self.megatron.pipeline_model_parallel_size - 1

    @property
    def layer(self) -> int:
        return (self.parameters - self.outer) // self.architecture.layers

    @property
    def trains_all(self) -> bool:
        return self.trainable == self.parameters


def policy_model(config: Config) -> ModelSource:
    model = config.actor_rollout_ref.model
    return ModelSource(model.path, overrides=model.override_config)


def critic_model(config: Config) -> ModelSource:
    model, policy = config.critic.model, config.actor_rollout_ref.model
    overrides = {**({} if model.path else policy.override_config), **model.override_config}
    return ModelSource(model.path or policy.path, "critic.model.path", overrides=overrides)


def actor_plan(config: Config, sizes: Batches) -> ModelPlan:
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    size = read_architecture(policy_model(config))
    adapter = adapter_parameters(model, size)
    return ModelPlan(
        architecture=size,
        parameters=size.parameters + adapter,
        outer=size.outer_parameters,
        trainable=adapter or size.parameters,
        number_bytes=number_bytes(config, actor.engine_memory.dtype),
        checkpointing=checkpointing(actor, actor.fsdp_config, model.enable_gradient_checkpointing),
        keys=actor.engine_memory,
        fsdp_size=actor.fsdp_config.fsdp_size,
        megatron=divided_by_megatron(actor, sizes.ranks),
        ranks=sizes.ranks,
        vocabulary=size.vocabulary,
        fused_head=model.use_fused_kernels,
        updates=sizes.actor,
    )


def critic_plan(config: Config, sizes: Batches) -> ModelPlan | None:
    if sizes.critic is None:
        return None
    model, size = config.critic.model, read_architecture(critic_model(config))
    return ModelPlan(
        architecture=size,
        parameters=size.critic_parameters,
        outer=size.critic_outer_parameters,
        trainable=size.critic_parameters,
        number_bytes=number_bytes(config, config.critic.engine_memory.dtype),
        checkpointing=checkpointing(config.critic, model.fsdp_config, model.enable_gradient_checkpointing),
        keys=config.critic.engine_memory,
        fsdp_size=model.fsdp_config.fsdp_size,
        megatron=divided_by_megatron(config.critic, sizes.ranks),
        ranks=sizes.ranks,
        vocabulary=0,
        fused_head=True,
        updates=sizes.critic,
    )


def shards_of(fsdp_size: int, ranks: int) -> int:
    """Ranks that share one copy of the weights."""
    return ranks if fsdp_size < 1 else fsdp_size


def divided_by_megatron(role: Actor | Critic, ranks: int) -> Megatron | None:
    return role.megatron if role.kind.model_parallel and ranks > 1 else None


def number_bytes(config: Config, dtype: str) -> int:
    float32 = dtype == "float32" or (dtype == "auto" and config.trainer.device == "cpu")
    return FLOAT32 if float32 else BFLOAT16


def checkpointing(role: Actor | Critic, fsdp: Fsdp, model: bool) -> bool:
    if role.kind.model_parallel:
        return role.megatron.recomputes_layers(checkpointing=model)
    return model if fsdp.gradient_checkpointing is None else fsdp.gradient_checkpointing


def adapter_parameters(model: Model, size: Architecture, section: str = "actor_rollout_ref.model") -> int:
    """`section`: where the keys of the model are, for error messages."""
    if model.lora_adapter_path is None:
        return size.adapter_parameters(model.lora_rank, model.target_modules)
    file = expand(model.lora_adapter_path) / "adapter_config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return size.adapter_parameters(saved["r"], saved["target_modules"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{section}.lora_adapter_path={model.lora_adapter_path}: {file} cannot be read: {error}"
        ) from error
