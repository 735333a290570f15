"""Policy losses in which each token stands for itself: vanilla, sapo, gpg, cispo. r is new over old probability."""

import torch
from torch import Tensor

from rloom.algos.policy_losses import LossSettings, LossTerms, TokenLoss, clip_parts, log_ratio


def vanilla(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate (Schulman et al. 2017), with clip-higher (DAPO) and dual clip (Ye et al. 2020)."""
    log_ratio_T = log_ratio(terms)
    loss_T, clipped_T = clipped_surrogate(terms.advantages_T, log_ratio_T.exp(), settings)
    bound_T = -terms.advantages_T * settings.clip_dual
    bounded_T = (terms.advantages_T < 0) & (loss_T > bound_T)
    parts_T = clip_parts(clipped_T, log_ratio_T) | {"actor/pg_clipfrac_lower": bounded_T.float()}
    return TokenLoss(torch.where(bounded_T, bound_T, loss_T), parts_T)


def clipped_surrogate(advantage_T: Tensor, ratio_T: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and where the clipped one won."""
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.maximum(plain_T, clipped_T), clipped_T > plain_T


def sapo(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Soft adaptive policy optimisation (Gao et al. 2025): a gate for a clip, -A (4 / tau) sigmoid(tau (r - 1)).

    At r = 1 its slope is that of -A r; away from it the gradient fades, faster for a negative advantage.
    """
    log_ratio_T = log_ratio(terms)
    tau_T = torch.full_like(log_ratio_T, settings.tau_neg).masked_fill(terms.advantages_T > 0, settings.tau_pos)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (log_ratio_T.exp() - 1))
    return TokenLoss(-terms.advantages_T * gate_T, {"actor/ppo_kl": -log_ratio_T.detach()})


def gpg(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Group policy gradient (Chu et al. 2025): plain REINFORCE, -A log p."""
    return TokenLoss(-terms.advantages_T * terms.logprobs_T, {"actor/ppo_kl": -log_ratio(terms).detach()})


def cispo(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Clipped importance-sampling weights (MiniMax-M1, 2025): REINFORCE weighted by clip(r), which is held fixed.

    The clip bounds the weight and never silences a token.
    """
    log_ratio_T = log_ratio(terms)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(-weight_T * terms.advantages_T * terms.logprobs_T, clip_parts(weight_T != ratio_T, log_ratio_T))
