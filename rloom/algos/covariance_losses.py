"""Policy losses that hold back the few tokens which drain the entropy (Cui et al. 2025): clip_cov, kl_cov.

Entropy falls where advantage and log-prob vary together. Both losses pick tokens by that product over the whole
mini-batch, so the choice is made once, before any split, by the log-probs of the policy that wrote.
"""

import torch
from torch import Tensor

from rloom.algos.packed import masked_mean
from rloom.algos.policy_losses import LossSettings, LossTerms, TokenLoss, clip_parts, log_ratio
from rloom.algos.token_losses import clipped_surrogate
from rloom.batch import TrainBatch


def clip_cov(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate, in which the chosen tokens teach nothing."""
    assert terms.chosen_T is not None  # the entry chooses
    log_ratio_T = log_ratio(terms)
    loss_T, clipped_T = clipped_surrogate(terms.advantages_T, log_ratio_T.exp(), settings)
    return TokenLoss(loss_T.where(~terms.chosen_T, 0), clip_parts(clipped_T | terms.chosen_T, log_ratio_T))


def kl_cov(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """-A r, and for the chosen tokens a penalty on moving at all: ppo_kl_coef * |d|."""
    assert terms.chosen_T is not None  # the entry chooses
    log_ratio_T = log_ratio(terms)
    penalty_T = (settings.ppo_kl_coef * log_ratio_T.abs()).where(terms.chosen_T, 0)
    return TokenLoss(-terms.advantages_T * log_ratio_T.exp() + penalty_T, {"actor/ppo_kl": -log_ratio_T.detach()})


def choose_for_clip_cov(batch: TrainBatch, settings: LossSettings) -> Tensor:
    """A share clip_cov_ratio of the tokens, from those whose covariance lies between the two bounds.

    The paper draws them at random. Here they are taken at even steps along the sorted covariances: as spread out,
    but the same whatever the order of the samples, and with no random state to keep.
    """
    covariance_T = covariances(batch)
    between_T = batch.loss_mask_T & (covariance_T > settings.clip_cov_lb) & (covariance_T < settings.clip_cov_ub)
    place_C = between_T.nonzero().squeeze(1)
    place_C = place_C[covariance_T[place_C].argsort(stable=True)]
    count = min(share(settings.clip_cov_ratio, batch), len(place_C))
    step = (torch.arange(count, device=place_C.device) + 0.5) * len(place_C) / max(count, 1)
    return marked(batch, place_C[step.long()])


def choose_for_kl_cov(batch: TrainBatch, settings: LossSettings) -> Tensor:
    """The share kl_cov_ratio of the tokens, those with the largest covariance; one below 0 is never chosen."""
    covariance_T = covariances(batch)
    place_C = (batch.loss_mask_T & (covariance_T > 0)).nonzero().squeeze(1)
    order_C = covariance_T[place_C].argsort(descending=True, stable=True)
    return marked(batch, place_C[order_C[: share(settings.kl_cov_ratio, batch)]])


def covariances(batch: TrainBatch) -> Tensor:
    assert batch.old_logprobs_T is not None  # needs_old_logprobs
    mask_T, advantage_T, logprob_T = batch.loss_mask_T, batch.advantages_T.double(), batch.old_logprobs_T.double()
    return (advantage_T - masked_mean(advantage_T, mask_T)) * (logprob_T - masked_mean(logprob_T, mask_T))


def share(ratio: float, batch: TrainBatch) -> int:
    """That share of the tokens that teach; at least one, where there is one."""
    tokens = int(batch.loss_mask_T.sum())
    return min(max(int(ratio * tokens), 1), tokens)


def marked(batch: TrainBatch, places: Tensor) -> Tensor:
    return torch.zeros_like(batch.mask_T).index_fill(0, places, True)
