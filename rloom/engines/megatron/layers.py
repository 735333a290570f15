"""The modules of a GPTModel that are rloom's: norm, attention over packed samples, router, and the layer around them.

S tokens of this rank (a slice of them with sequence parallelism), T tokens of the micro-batch, packed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rloom.engines.megatron.core import (
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    PackedSeqParams,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSubmodules,
    SequentialMLP,
    TopKRouter,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from rloom.engines.megatron.sizes import Shape
from rloom.models.attention import AttentionOptions, PackedAttention
from rloom.models.routing import replayed

Operation = TypeVar("Operation", bound=Callable[..., Any])


@dataclass
class PackedSamples(PackedSeqParams):  # type: ignore[misc]
    """A micro-batch's samples, for the layers. megatron-core hands it to each of them and reads only `qkv_format`."""

    qkv_format: str = "sbhd"  # tokens x one row x heads x head size
    attend: PackedAttention | None = None
    cosine_T: Tensor | None = None  # [T, 1, 1, head size], of the rotary embedding
    sine_T: Tensor | None = None
    experts_SMK: Tensor | None = None  # the experts that the rollout chose; -1: the router chooses
    mismatch_S: Tensor | None = None  # share of them that the routers of this stage would not have chosen


class Norm(nn.Module):
    """RMSNorm in float32. megatron-core's own does not allow sequence parallelism without Transformer Engine."""

    compiles = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        compute = compiled(normalize) if self.compiles else normalize
        return compute(hidden, self.weight, self.eps)


def normalize(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = hidden.float()
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary embedding of the families in sizes.py: the first half of a head's numbers with the second."""

    def rotated(tensor: Tensor) -> Tensor:
        first, second = tensor.chunk(2, -1)
        return tensor * cosine + torch.cat([-second, first], -1) * sine

    return rotated(query), rotated(key)


@cache
def compiled(function: Operation) -> Operation:
    """One kernel instead of several."""
    return cast(Operation, torch.compile(function, dynamic=True))


class PackedCoreAttention(nn.Module):
    """Rotary embedding and attention within each sample, on the heads of this rank."""

    compiles = False

    def __init__(self, shape: Shape, layer_number: int) -> None:
        super().__init__()
        self.scale = shape.head_size**-0.5
        self.window = shape.windows[layer_number - 1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedSamples,
        **_: Any,
    ) -> Tensor:
        """[T, 1, heads, size] each -> [T, 1, heads * size]"""
        attend, cosine, sine = packed_seq_params.attend, packed_seq_params.cosine_T, packed_seq_params.sine_T
        assert attend is not None and cosine is not None and sine is not None
        query, key = (compiled(rotate) if self.compiles else rotate)(query, key, cosine, sine)
        rows = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        out = attend(rows[0], rows[1], rows[2], AttentionOptions(self.scale, self.window))
        return out.transpose(0, 1).flatten(2)


class Replay:
    """A layer's choices of the rollout. megatron-core's RouterReplay has those of one micro-batch at a time only."""

    def __init__(self, packed: PackedSamples, layer: int, layers: int) -> None:
        assert packed.experts_SMK is not None and packed.mismatch_S is not None
        self.experts_SK, self.mismatch_S, self.layers = packed.experts_SMK[:, layer], packed.mismatch_S, layers

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: Any, group_topk: Any, compute: Any
    ) -> tuple[Tensor, Tensor]:
        own_SK = compute(scores, topk, num_groups=groups, group_topk=group_topk)[1]
        chosen_SK = replayed(self.experts_SK, own_SK, self.mismatch_S, topk * self.layers)
        return scores.gather(1, chosen_SK), chosen_SK


class Router(TopKRouter):  # type: ignore[misc]
    def gating(self, input: Tensor) -> Tensor:
        """In the dtype of the model, as in transformers and vLLM. megatron-core's needs Transformer Engine."""
        return nn.functional.linear(input, self.weight)


class Layer(TransformerLayer):  # type: ignore[misc]
    recomputes = False  # keep the layer's input only, and run it again in the backward pass

    def forward(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        if self.recomputes and torch.is_grad_enabled():
            found: tuple[Tensor, Tensor | None] = checkpoint(
                self.run, hidden_states, arguments, use_reentrant=False, preserve_rng_state=False
            )
            return found
        return self.run(hidden_states, arguments)

    def run(self, hidden_states: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The choices of the routers are set here, so that a recomputation gets those of its own micro-batch."""
        if isinstance(self.mlp, MoELayer):
            packed, layers = arguments["packed_seq_params"], self.config.num_layers
            stages = self.config.pipeline_model_parallel_size
            replayed = None if packed.experts_SMK is None else Replay(packed, self.layer_number - 1, layers // stages)
            self.mlp.router.router_replay = replayed
        found: tuple[Tensor, Tensor | None] = super().forward(hidden_states=hidden_states, **arguments)
        return found


def residual_add(training: bool, fused: bool) -> Any:
    """In place of megatron-core's bias, dropout and add: there is neither bias nor dropout."""

    def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + output_with_bias[0]

    return add


def layer_spec(shape: Shape) -> ModuleSpec:
    def core_attention(*, layer_number: int, **_: Any) -> PackedCoreAttention:
        return PackedCoreAttention(shape, layer_number)

    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=core_attention,
        linear_proj=RowParallelLinear,
        q_layernorm=Norm if shape.qk_norm else None,
        k_layernorm=Norm if shape.qk_norm else None,
    )
    return ModuleSpec(
        module=Layer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
            self_attn_bda=residual_add,
            pre_mlp_layernorm=Norm,
            mlp=feed_forward(shape),
            mlp_bda=residual_add,
        ),
    )


def feed_forward(shape: Shape) -> ModuleSpec:
    matrices = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if shape.experts is None:
        return ModuleSpec(module=MLP, submodules=matrices)
    experts = ModuleSpec(module=SequentialMLP, submodules=matrices)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
