"""Policy losses with one ratio an answer: gspo, geo_mean. d is the log of new over old probability of a token."""

import torch

from rloom.algos.policy_losses import LossSettings, LossTerms, TokenLoss, clip_parts, log_ratio
from rloom.algos.token_losses import clipped_surrogate


def gspo(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Group sequence policy optimisation (Zheng et al. 2025), in its token form.

    The ratio is s = exp(mean d) for all tokens of an answer; its gradient goes through each token's own log-prob, which
    for one advantage an answer is the gradient of the sequence form.
    """
    log_ratio_T = log_ratio(terms)
    own_T = terms.logprobs_T - terms.logprobs_T.detach()  # 0, with a gradient
    ratio_T = (terms.sample_mean(log_ratio_T).detach() + own_T).exp()
    loss_T, clipped_T = clipped_surrogate(terms.advantages_T, ratio_T, settings)
    return TokenLoss(loss_T, clip_parts(clipped_T, log_ratio_T))


def geo_mean(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Geometric-mean policy optimisation (Zhao et al. 2025): -A exp(mean of clipped d).

    Each d is clipped where going further would still be rewarded. The clip range counts in log space. The clip
    fractions count every d outside the range: `pg_clipfrac` under a positive advantage, `pg_clipfrac_lower` under a
    negative one.
    """
    log_ratio_T = log_ratio(terms)
    held_T = log_ratio_T.clamp(-settings.clip_low, settings.clip_high)
    positive_T, negative_T = terms.advantages_T > 0, terms.advantages_T < 0
    kept_T = torch.where(negative_T, torch.maximum(log_ratio_T, held_T), torch.minimum(log_ratio_T, held_T))
    loss_T = -terms.advantages_T * terms.sample_mean(kept_T).exp()
    outside_T = held_T != log_ratio_T
    lower_T = {"actor/pg_clipfrac_lower": (outside_T & negative_T).float()}
    return TokenLoss(loss_T, clip_parts(outside_T & positive_T, log_ratio_T) | lower_T)
