"""The models of a run as a plan sees them: how large, how much of each learns, in which precision, how it is spread."""

import json
from dataclasses import dataclass
from typing import Any

from rloom.config.load import expand
from rloom.config.schema import Config, Fsdp
from rloom.errors import ModelError
from rloom.plan.architecture import Architecture, read_architecture
from rloom.plan.batches import Updates, ranks_of

FLOAT32, BFLOAT16 = 4, 2  # bytes a number


@dataclass(frozen=True)
class Role:
    """A model that learns. P parameters are those of the whole model."""

    architecture: Architecture
    parameters: int
    outer: int  # of no layer: embeddings, head, last norm
    learned: int  # all of them, or the adapter
    number_bytes: int  # of the arithmetic
    checkpointing: bool
    offload_parameters: bool
    offload_optimizer: bool
    shards: int  # ranks that share one copy
    sharded: bool  # the engine of several processes
    vocabulary: int  # of the head; a critic's is 0
    fused_head: bool
    updates: Updates

    @property
    def layer(self) -> int:
        return (self.parameters - self.outer) // self.architecture.layers

    @property
    def learns_whole(self) -> bool:
        return self.learned == self.parameters


def actor(config: Config, updates: Updates) -> Role:
    model, section = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    size = read_architecture(model.path, "actor_rollout_ref.model.path", model.override_config)
    adapter = adapter_parameters(config, size)
    return Role(
        architecture=size,
        parameters=size.parameters + adapter,
        outer=size.outer_parameters,
        learned=adapter or size.parameters,
        checkpointing=checkpointing(section.fsdp_config, model.enable_gradient_checkpointing),
        vocabulary=size.vocabulary,
        fused_head=model.use_fused_kernels,
        updates=updates,
        **spread(config, section.fsdp_config),
    )


def critic(config: Config, updates: Updates) -> Role:
    model, policy = config.critic.model, config.actor_rollout_ref.model
    overrides = {**({} if model.path else policy.override_config), **model.override_config}
    size = read_architecture(model.path or policy.path, "critic.model.path", overrides)
    return Role(
        architecture=size,
        parameters=size.critic_parameters,
        outer=size.critic_outer_parameters,
        learned=size.critic_parameters,
        checkpointing=checkpointing(model.fsdp_config, model.enable_gradient_checkpointing),
        vocabulary=0,
        fused_head=True,
        updates=updates,
        **spread(config, model.fsdp_config),
    )


def spread(config: Config, fsdp: Fsdp) -> dict[str, Any]:
    ranks = ranks_of(config)
    exact = fsdp.dtype == "float32" or (fsdp.dtype == "auto" and config.trainer.device == "cpu")
    return {
        "number_bytes": FLOAT32 if exact else BFLOAT16,
        "offload_parameters": fsdp.param_offload,
        "offload_optimizer": fsdp.optimizer_offload,
        "shards": ranks if fsdp.fsdp_size < 1 else fsdp.fsdp_size,
        "sharded": ranks > 1,
    }


def checkpointing(fsdp: Fsdp, model: bool) -> bool:
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
