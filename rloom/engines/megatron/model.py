"""One stage of a model as GPTModel of megatron-core. It has no weights: flat.py places them, weights.py reads them."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rloom.batch import Batch
from rloom.engines.megatron.core import GPTModel, TransformerBlockSubmodules, TransformerConfig
from rloom.engines.megatron.groups import MegatronGroups
from rloom.engines.megatron.layers import Layer, Norm, PackedCoreAttention, PackedSamples, layer_spec
from rloom.engines.megatron.sizes import Shape
from rloom.errors import ConfigError
from rloom.models.attention import PackedAttention


class PipelineStage(GPTModel):  # type: ignore[misc]
    """Tokens, or the hidden states of the stage before, to hidden states."""

    def setup_embeddings_and_output_layer(self) -> None:
        """megatron-core copies tied weights between GPUs here; there are no weights yet."""

    def forward(self, tokens_T: Tensor, packed: PackedSamples, received: Tensor | None) -> Tensor:
        """[S, 1, H]: S tokens, a slice of them with sequence parallelism."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=tokens_T.unsqueeze(0), position_ids=None)
        else:
            self.decoder.set_input_tensor(received)
        hidden: Tensor = self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=packed)
        return hidden


class Packer:
    """Micro-batches for the layers. `rotary`: transformers' rotary embedding, with its scaling."""

    def __init__(self, rotary: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, self.dtype = rotary.inv_freq, dtype
        assert isinstance(frequencies, Tensor)
        self.frequencies = frequencies.to(device, torch.float32)
        self.scale = float(rotary.attention_scaling)  # type: ignore[arg-type]

    def pack(self, host_batch: Batch, device_batch: Batch, size: int) -> tuple[Tensor, PackedSamples]:
        """The tokens, padded to `size`, and the samples that they belong to."""
        tokens_T, length_N = device_batch.tokens_T, host_batch.length_N
        padding = size - len(tokens_T)
        if padding:  # a sample of its own, so that no other sample attends to it
            tokens_T = nn.functional.pad(tokens_T, (0, padding))
            length_N = torch.cat([length_N, length_N.new_tensor([padding])])
        attend = PackedAttention(length_N, tokens_T.device)
        half = attend.position_T.float()[:, None] * self.frequencies
        angle_T = torch.cat([half, half], -1)[:, None, None]
        cosine_T, sine_T = ((part * self.scale).to(self.dtype) for part in (angle_T.cos(), angle_T.sin()))
        return tokens_T, PackedSamples(attend=attend, cosine_T=cosine_T, sine_T=sine_T)


def build_stage(
    shape: Shape,
    groups: MegatronGroups,
    *,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: int,  # padded
    recompute: bool,
    compiles: bool,  # the operations between matmuls
    overrides: Mapping[str, Any],
) -> PipelineStage:
    """On the meta device."""
    config = transformer_config(shape, groups, device, dtype, overrides)
    layers = shape.layers // groups.sizes.pipeline
    spec = TransformerBlockSubmodules([layer_spec(shape)] * layers, layer_norm=Norm)
    with torch.device("meta"):
        stage = PipelineStage(
            config,
            spec,
            vocabulary,
            max_sequence_length=0,  # for learned positions, which these models do not have
            pre_process=groups.is_first,
            post_process=groups.is_last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
        )
    for module in stage.modules():
        if isinstance(module, Layer):
            module.recomputes = recompute
        if isinstance(module, Norm | PackedCoreAttention):
            module.compiles = compiles
    return stage


def transformer_config(
    shape: Shape, groups: MegatronGroups, device: torch.device, dtype: torch.dtype, overrides: Mapping[str, Any]
) -> TransformerConfig:
    sizes, experts = groups.sizes, shape.experts
    settings: dict[str, Any] = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_size,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=shape.epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        sequence_parallel=sizes.slices_tokens,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=True,  # or it creates parameters on a GPU, before they can be placed
        gradient_accumulation_fusion=False,  # a kernel of apex
        bias_activation_fusion=device.type == "cuda",
        bias_dropout_fusion=False,
        apply_rope_fusion=False,  # a kernel of Transformer Engine
    )
    if experts is not None:
        settings |= dict(
            num_moe_experts=experts.count,
            moe_router_topk=experts.per_token,
            moe_ffn_hidden_size=experts.ffn,
            moe_router_pre_softmax=not experts.normalized,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall" if device.type == "cuda" else "allgather",
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
        )
    try:
        with warnings.catch_warnings():  # about settings that are not given
            warnings.simplefilter("ignore")
            return TransformerConfig(**settings | dict(overrides))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"override_transformer_config={dict(overrides)}: megatron-core refuses it: {error}"
        ) from error
