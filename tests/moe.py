"""Tiny mixture-of-experts models, and the experts that transformers' own forward pass chooses."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig, OlmoeConfig, PreTrainedConfig, PreTrainedModel, Qwen2MoeConfig, Qwen3MoeConfig

from tests.helpers import SHAPE

EXPERTS = 8
QWEN: Mapping[str, Any] = {"num_experts": EXPERTS, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
MOE_FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    # three layers, of which the second has no router
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **{**SHAPE, **QWEN, "num_hidden_layers": 3}, head_dim=16, mlp_only_layers=[1], norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=EXPERTS, num_experts_per_tok=2),
    # weights that do not sum to 1, and a shared expert
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE, **QWEN, shared_expert_intermediate_size=16, decoder_sparse_step=1, norm_topk_prob=False
    ),
    "olmoe": lambda: OlmoeConfig(**SHAPE, num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=False),
}


@torch.no_grad()
def chosen_by_transformers(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[tokens, layers with a router, experts per token], of one pass over the whole sequence."""
    found: list[Tensor] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: found.append(output[2])) for router in routers]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)
