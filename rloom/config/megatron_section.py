"""The keys of the Megatron engine, by verl's names, and of router replay."""

from collections.abc import Mapping
from typing import Any, Literal

from rloom.config.section import Section, key

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
WHERE_NEEDED = "null: off; `rloom train` switches it on if the run certainly does not fit without it, and prints that."
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
# entries of TransformerConfig that select kernels and buffers; rloom's model has one implementation of each
ONE_IMPLEMENTATION = frozenset(
    {
        *("apply_rope_fusion", "attention_backend", "bias_activation_fusion", "bias_dropout_fusion"),
        *("deallocate_pipeline_outputs", "gradient_accumulation_fusion", "masked_softmax_fusion"),
        *("moe_enable_deepep", "moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_overlap"),
        *("moe_token_dispatcher_type", "persist_layer_norm", "variable_seq_lengths"),
    }
)


class EngineMemory(Section):
    """What every training engine has."""

    param_offload: bool | None = key(
        None,
        f"Keep the parameters in host memory while they are not in use. No effect on a CPU. {WHERE_NEEDED}",
        same_run=True,
    )
    optimizer_offload: bool | None = key(
        None, f"Keep the optimizer state in host memory between updates. {WHERE_NEEDED}", same_run=True
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "Data type of weights and computation; the optimizer keeps float32 copies. auto: bfloat16 on a GPU, float32 on "
        "a CPU.",
    )


class Megatron(EngineMemory):
    tensor_model_parallel_size: int = key(
        1, "Ranks that divide every layer (TP). Divides the model's attention heads and MLP.", ge=1, same_run=True
    )
    pipeline_model_parallel_size: int = key(
        1,
        "Pipeline stages (PP): ranks that each hold an equal number of layers. TP × PP divides the workers.",
        ge=1,
        same_run=True,
    )
    expert_model_parallel_size: int = key(
        1,
        "Ranks that divide the experts of a mixture-of-experts model (EP). Divides their number.",
        ge=1,
        same_run=True,
    )
    expert_tensor_parallel_size: int | None = key(
        None, "Ranks that divide each expert: 1, or the TP of the other layers. null: that TP.", ge=1, same_run=True
    )
    sequence_parallel: bool = key(
        True,
        "Divide the tokens between layers over the TP ranks: less activation memory. No effect with TP 1.",
        same_run=True,
    )
    override_transformer_config: dict[str, Any] = key(
        {},
        "Entries of megatron-core's TransformerConfig, such as recompute_granularity. Without a recompute_granularity, "
        "`model.enable_gradient_checkpointing` recomputes every layer (full, uniform, 1).",
    )

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model and get the same samples."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_tensor_ranks(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def divides_tokens(self) -> bool:
        """Sequence parallelism: between layers a rank has only its part of the tokens."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def offloaded(self) -> list[str]:
        """What is in host memory while it is not in use."""
        switches = {
            "parameters": self.param_offload,
            "optimizer state": self.optimizer_offload,
        }
        return [what for what, is_on in switches.items() if is_on]

    def transformer_config(self) -> dict[str, Any]:
        """The entries of megatron-core's TransformerConfig that the user set and that have an effect."""
        own = RECOMPUTE if self.recompute_granularity == "full" else ()
        given = self.override_transformer_config.items()
        return {name: value for name, value in given if name not in ONE_IMPLEMENTATION and name not in own}

    @property
    def recompute_granularity(self) -> str | None:
        granularity: str | None = self.override_transformer_config.get("recompute_granularity")
        return granularity

    def recomputes_layers(self, *, checkpointing: bool) -> bool:
        """Only the inputs of layers are saved for the backward pass. rloom's layers do it themselves."""
        return checkpointing if self.recompute_granularity is None else self.recompute_granularity == "full"


class CriticMegatron(Megatron):
    """Validation replaces null by the actor's size: `with_actor_sizes`."""

    tensor_model_parallel_size: int = key(
        None, "As the actor's, for the critic's ranks. null: the actor's.", ge=1, same_run=True
    )
    pipeline_model_parallel_size: int = key(
        None, "As the actor's, for the critic's ranks. null: the actor's.", ge=1, same_run=True
    )
    expert_model_parallel_size: int = key(
        None, "As the actor's, for the critic's ranks. null: the actor's.", ge=1, same_run=True
    )
    expert_tensor_parallel_size: int | None = key(None, "As the actor's, for the critic's ranks.", ge=1, same_run=True)


def with_actor_sizes(critic: Mapping[str, Any], actor: Mapping[str, Any]) -> dict[str, Any]:
    """The critic's section with the actor's sizes where it has none. Actor and critic often share workers, which can be
    divided in one way only."""
    filled = dict(critic)
    for name in SIZES:
        if filled.get(name) is None:
            filled[name] = actor.get(name, Megatron.model_fields[name].default)
    return filled


class RefMegatron(Section):
    """Sizes that verl's scripts repeat for the reference."""

    tensor_model_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    pipeline_model_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    expert_model_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    expert_tensor_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    param_offload: bool | None = key(
        None, f"Keep the reference's parameters in host memory while they are not in use. {WHERE_NEEDED}"
    )


class RouterReplay(Section):
    mode: Literal["disabled", "R3"] = key(
        "disabled",
        "R3: in training, tokens go to the experts that the rollout engine chose for them (mixture-of-experts models). "
        "disabled: the trainer's router chooses anew.",
    )
