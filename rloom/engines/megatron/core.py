"""What rloom uses of megatron-core, imported in one place.

It warns on import of optional packages that are not installed and of its own deprecated modules.
"""

import warnings

from rloom.errors import ConfigError

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            RowParallelLinear,
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )
        from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.mlp import MLP, MLPSubmodules
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
        from megatron.core.transformer.transformer_config import TransformerConfig
        from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
except ImportError as error:
    raise ConfigError(
        f"actor_rollout_ref.actor.strategy=megatron: megatron-core cannot be imported ({error}); "
        "install it with `pip install 'rloom[megatron]'`, or use fsdp2"
    ) from error

__all__ = [
    "MLP",
    "AttnMaskType",
    "ColumnParallelLinear",
    "GPTModel",
    "MLPSubmodules",
    "MoELayer",
    "MoESubmodules",
    "ModuleSpec",
    "PackedSeqParams",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "SequentialMLP",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "tensor_parallel",
]
