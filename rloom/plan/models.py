"""The models that a run trains: size, trainable parameters, precision, and how ranks share them."""

import json
from dataclasses import dataclass

from rloom.config.load import expand
from rloom.config.schema import Config, Fsdp
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
    fsdp: Fsdp
    ranks: int
    vocabulary: int  # of the head; 0 for a critic
    fused_head: bool
    updates: Updates

    @property
    def sharded(self) -> bool:
        """Several ranks have the FSDP2 engine, one process the local one."""
        return self.ranks > 1

    @property
    def shards(self) -> int:
        """1 in one process."""
        return shards_of(self.fsdp, self.ranks)

    @property
    def layer(self) -> int:
        return (self.parameters - self.outer) // self.architecture.layers

    @property
    def trains_all(self) -> bool:
        return self.trainable == self.parameters


def actor_plan(config: Config, sizes: Batches) -> ModelPlan:
    model, fsdp = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.fsdp_config
    size = read_architecture(model.path, "actor_rollout_ref.model.path", model.override_config)
    adapter = adapter_parameters(config, size)
    return ModelPlan(
        architecture=size,
        parameters=size.parameters + adapter,
        outer=size.outer_parameters,
        trainable=adapter or size.parameters,
        number_bytes=number_bytes(config, fsdp),
        checkpointing=checkpointing(fsdp, model.enable_gradient_checkpointing),
        fsdp=fsdp,
        ranks=sizes.ranks,
        vocabulary=size.vocabulary,
        fused_head=model.use_fused_kernels,
        updates=sizes.actor,
    )


def critic_plan(config: Config, sizes: Batches) -> ModelPlan | None:
    if sizes.critic is None:
        return None
    model, policy = config.critic.model, config.actor_rollout_ref.model
    overrides = {**({} if model.path else policy.override_config), **model.override_config}
    size = read_architecture(model.path or policy.path, "critic.model.path", overrides)
    return ModelPlan(
        architecture=size,
        parameters=size.critic_parameters,
        outer=size.critic_outer_parameters,
        trainable=size.critic_parameters,
        number_bytes=number_bytes(config, model.fsdp_config),
        checkpointing=checkpointing(model.fsdp_config, model.enable_gradient_checkpointing),
        fsdp=model.fsdp_config,
        ranks=sizes.ranks,
        vocabulary=0,
        fused_head=True,
        updates=sizes.critic,
    )


def shards_of(fsdp: Fsdp, ranks: int) -> int:
    """Ranks that share one copy of the weights."""
    return ranks if fsdp.fsdp_size < 1 else fsdp.fsdp_size


def number_bytes(config: Config, fsdp: Fsdp) -> int:
    float32 = fsdp.dtype == "float32" or (fsdp.dtype == "auto" and config.trainer.device == "cpu")
    return FLOAT32 if float32 else BFLOAT16


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
