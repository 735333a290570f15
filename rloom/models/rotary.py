"""Rotary embeddings whose frequencies depend on the length of a sample."""

import torch
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def fix_rotary_scaling(model: PreTrainedModel, longest: int) -> None:
    """Set the frequencies of length-dependent rotary embeddings once, for the run's longest sample.

    transformers sets them in every pass by its largest position (longrope of Phi-3: two sets; dynamic: a formula), so a
    sample's logits would depend on the other samples in the batch, and change in the middle of an answer.
    """
    for module in model.modules():
        kinds = vars(module).get("rope_type")
        if isinstance(kinds, str) and depends_on_length(kinds):
            module(torch.zeros(1), last_position(longest))
            module.rope_type = fixed(kinds)
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if depends_on_length(kind):
                    module(torch.zeros(1), last_position(longest), layer_type)
                    kinds[layer_type] = fixed(kind)


def varies_with_length(model: PreTrainedModel) -> bool:
    """Whether the frequencies depend on the longest sample of a pass."""
    kinds = [vars(module).get("rope_type") for module in model.modules()]
    named = [name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])]
    return any(isinstance(name, str) and depends_on_length(name) for name in named)


def depends_on_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


def fixed(kind: str) -> str:
    """A rope type for which transformers does not recompute the frequencies."""
    return f"fixed {kind.replace('dynamic', 'ntk')}"


def last_position(longest: int) -> Tensor:
    return torch.tensor([[longest - 1]])
