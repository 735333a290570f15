"""Policy losses: one loss a token, not yet aggregated. T tokens.

Each has the signature `(terms, settings) -> TokenLoss`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """What a policy loss is made of. Outside the mask every entry is to be ignored."""

    logprobs_T: Tensor  # of the policy that learns; carries the gradient
    old_logprobs_T: Tensor  # of the policy that wrote
    advantages_T: Tensor
    mask_T: Tensor


@dataclass(frozen=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0


@dataclass(frozen=True)
class TokenLoss:
    loss_T: Tensor
    parts_T: Mapping[str, Tensor] = field(default_factory=dict)  # averaged over tokens into metrics of that name


PolicyLoss = Callable[[LossTerms, LossSettings], TokenLoss]


def log_ratio(terms: LossTerms) -> Tensor:
    """Clamped: a ratio of e^20 says all there is to say, and its square is still finite."""
    return (terms.logprobs_T - terms.old_logprobs_T).clamp(-20, 20)


def vanilla(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate (Schulman et al. 2017), with clip-higher (DAPO) and dual clip (Ye et al. 2020)."""
    log_ratio_T = log_ratio(terms)
    ratio_T = log_ratio_T.exp()
    advantage_T = terms.advantages_T
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_T = torch.maximum(plain_T, clipped_T)
    bound_T = -advantage_T * settings.clip_dual
    bounded_T = (advantage_T < 0) & (loss_T > bound_T)
    parts_T = {
        "actor/pg_clipfrac": (clipped_T > plain_T).float(),
        "actor/pg_clipfrac_lower": bounded_T.float(),
        "actor/ppo_kl": -log_ratio_T.detach(),
    }
    return TokenLoss(torch.where(bounded_T, bound_T, loss_T), parts_T)
