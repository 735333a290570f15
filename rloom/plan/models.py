"""The models that a run trains: size, trainable parameters, precision, and how ranks share them."""

import json
from dataclasses import dataclass
from typing import Any

from rloom.config.load import expand
from rloom.config.schema import Actor, Config, Critic, Fsdp
from rloom.config.sections import EngineMemory, Megatron
from rloom.errors import ModelError
from rloom.plan.architecture import Architecture, read_architecture
from rloom.plan.batches import Batches, Updates

FLOAT32, BFLOAT16 = 4, 2  # bytes of a number


@dataclass(frozen=True)
class ModelPlan:
    """The actor or the critic."""

    architecture: Architecture
    parameters: int  # with the adapter
    outer: int  # parameters outside the layers: embeddings, head, last norm
    trainable: int  # parameters: all, or the adapter's
    number_bytes: int  # of weights and activations in the arithmetic
    checkpointing: bool
    keys: EngineMemory  # offload
    fsdp_size: int
    megatron: Megatron | None  # None: one process, or FSDP2
    ranks: int
    vocabulary: int  # of the head; 0 for a critic
    fused_head: bool
    updates: Updates
    stage: int = 0  # of Megatron's pipeline

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


def policy_model(config: Config) -> tuple[str, str, dict[str, Any]]:
    """(path, its key, entries of config.json that are replaced)"""
    model = config.actor_rollout_ref.model
    return model.path, "actor_rollout_ref.model.path", model.override_config


def critic_model(config: Config) -> tuple[str, str, dict[str, Any]]:
    model, policy = config.critic.model, config.actor_rollout_ref.model
    overrides = {**({} if model.path else policy.override_config), **model.override_config}
    return model.path or policy.path, "critic.model.path", overrides


def actor_plan(config: Config, sizes: Batches) -> ModelPlan:
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    size = read_architecture(*policy_model(config))
    adapter = adapter_parameters(config, size)
    return ModelPlan(
        architecture=size,
        parameters=size.parameters + adapter,
        outer=size.outer_parameters,
        trainable=adapter or size.parameters,
        number_bytes=number_bytes(config, actor.engine_memory),
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
    model, size = config.critic.model, read_architecture(*critic_model(config))
    return ModelPlan(
        architecture=size,
        parameters=size.critic_parameters,
        outer=size.critic_outer_parameters,
        trainable=size.critic_parameters,
        number_bytes=number_bytes(config, config.critic.engine_memory),
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
    return role.megatron if role.strategy == "megatron" and ranks > 1 else None


def number_bytes(config: Config, keys: EngineMemory) -> int:
    float32 = keys.dtype == "float32" or (keys.dtype == "auto" and config.trainer.device == "cpu")
    return FLOAT32 if float32 else BFLOAT16


def checkpointing(role: Actor | Critic, fsdp: Fsdp, model: bool) -> bool:
    if role.strategy == "megatron":
        return role.megatron.recomputes_layers(checkpointing=model)
    return model if fsdp.gradient_checkpointing is None else fsdp.gradient_checkpointing


def adapter_parameters(config: Config, size: Architecture) -> int:
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is None:
        return size.adapter_parameters(model.lora_rank, model.target_modules)
    file = expand(model.lora_adapter_path) / "adapter_config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return size.adapter_parameters(saved["r"], saved["target_modules"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"actor_rollout_ref.model.lora_adapter_path={model.lora_adapter_path}: {file} cannot be read: {error}"
        ) from error
