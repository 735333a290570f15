"""The optimizer of an engine: updates of float32 master weights, and the device of the moments."""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rloom.engines.base import AdamW, Update
from rloom.engines.micro_batches import Tally

EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


def make_optimizer(masters: Collection[Tensor], settings: AdamW) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        masters, lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )  # each step sets the learning rate


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    masters: Collection[Tensor],
    settings: AdamW,
    learning_rate: float,
    whole_norm: Callable[[Tensor], Tensor] = lambda norm: norm,  # from the norm of this rank's shard
) -> Tensor:
    """Clip the gradient, apply it if it is finite, and clear it. Returns its norm, on the device."""
    norm = whole_norm(get_total_norm([master.grad for master in masters if master.grad is not None]))
    step_clipped(optimizer, settings, learning_rate, norm)
    return norm


def step_clipped(optimizer: torch.optim.Optimizer, settings: AdamW, learning_rate: float, norm: Tensor) -> None:
    """Apply a gradient of this norm, if it is finite, and clear it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # The fused step divides gradients by grad_scale and does nothing if found_inf is 1 (torch's GradScaler sets these
    # attributes): clipping and skipping need no device synchronisation.
    optimizer.grad_scale = ((norm + EPSILON) / settings.grad_clip).clamp(min=1.0)  # type: ignore[attr-defined]
    optimizer.found_inf = (~torch.isfinite(norm)).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def read_update(norm: Tensor, tally: Tally) -> Update:
    """Called after all kernels of an update are launched: the reads synchronise with the device."""
    value = float(norm)
    return Update(value, math.isfinite(value), tally.read_metrics(), tally.read_outputs())


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device)


def load_moments(optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Tensor]], device: torch.device) -> None:
    """Load saved moments by the index of their parameter; the settings stay those of the configuration."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": settings})
    move_moments(optimizer, device)  # torch puts them on the device of the masters
