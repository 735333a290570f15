"""The optimizer's part of any engine: one update of float32 masters, and where its moments rest."""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rloom.algos.objectives import Shares
from rloom.engines.base import AdamW, Update
from rloom.engines.micro_batches import read_metrics

TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to a norm


def make_optimizer(masters: Collection[Tensor], settings: AdamW) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        masters, lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )  # the learning rate comes with each step


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    masters: Collection[Tensor],
    settings: AdamW,
    learning_rate: float,
    whole_norm: Callable[[Tensor], Tensor] = lambda norm: norm,  # of the gradient, from that of the part held here
) -> Tensor:
    """Clip, apply unless it is not finite, forget. The gradient's norm, not read yet."""
    norm = whole_norm(get_total_norm([master.grad for master in masters if master.grad is not None]))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # The fused step divides gradients by the one and changes nothing if the other is 1 (torch's own GradScaler sets
    # them so): the device goes on before the host has seen the norm.
    optimizer.grad_scale = ((norm + TINY) / settings.grad_clip).clamp(min=1.0)  # type: ignore[attr-defined]
    optimizer.found_inf = (~torch.isfinite(norm)).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def read_update(norm: Tensor, total: Shares) -> Update:
    """Read at the end, when all of an update has been asked of the device."""
    found = float(norm)
    return Update(found, math.isfinite(found), read_metrics(total))


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device)


def load_moments(optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Tensor]]) -> None:
    """Saved moments, by the place of their parameter; the settings stay those the configuration says."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": settings})
