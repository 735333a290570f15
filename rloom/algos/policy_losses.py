"""Policy losses. T tokens, N samples.

A policy loss is a pure function `(terms, settings) -> TokenLoss`: one loss per token, not yet aggregated. It may read
the other tokens of a sample but not other samples, so that any split of a mini-batch gives the same loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rloom.algos.packed import masked_mean, sum_by_sample
from rloom.batch import TrainBatch


@dataclass(frozen=True)
class LossTerms:
    """The inputs of a policy loss. Entries outside the mask have no meaning."""

    logprobs_T: Tensor  # under the current policy; carries the gradient
    old_logprobs_T: Tensor  # under the policy that generated
    advantages_T: Tensor
    mask_T: Tensor
    sample_T: Tensor  # which sample each token belongs to
    samples: int
    chosen_T: Tensor | None = None  # iff the registry entry has `choose`: the tokens it chose

    def sample_sum(self, value_T: Tensor) -> Tensor:
        """For each token, the sum over the masked tokens of its sample."""
        return sum_by_sample(value_T.where(self.mask_T, 0), self.sample_T, self.samples)[self.sample_T]

    def sample_mean(self, value_T: Tensor) -> Tensor:
        return self.sample_sum(value_T) / self.sample_sum(torch.ones_like(value_T)).clamp(min=1)

    def geometric_mean(self, weight_T: Tensor) -> Tensor:
        """For each token, the geometric mean over the masked tokens of its sample; a weight of 0 counts as 1e-10."""
        return self.sample_mean((weight_T + 1e-10).log()).exp()


@dataclass(frozen=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0  # vanilla
    tau_pos: float = 1.0  # sapo
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002  # clip_cov
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002  # kl_cov
    ppo_kl_coef: float = 0.1


@dataclass(frozen=True)
class TokenLoss:
    loss_T: Tensor
    parts_T: Mapping[str, Tensor] = field(default_factory=dict)  # averaged over tokens into metrics of that name


PolicyLoss = Callable[[LossTerms, LossSettings], TokenLoss]


def log_ratio(terms: LossTerms) -> Tensor:
    """Clamped to ±20, so that the ratio and its square are finite."""
    return (terms.logprobs_T - terms.old_logprobs_T).clamp(-20, 20)


def ratio_parts(log_ratio_T: Tensor) -> dict[str, Tensor]:
    return {"actor/ppo_kl": -log_ratio_T.detach(), "actor/ppo_ratio": log_ratio_T.detach().exp()}


def clip_parts(clipped_T: Tensor, log_ratio_T: Tensor) -> dict[str, Tensor]:
    return {"actor/pg_clipfrac": clipped_T.float(), **ratio_parts(log_ratio_T)}


# Losses with one ratio per token. r is the ratio of new to old probability.


def vanilla(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate (Schulman et al. 2017), with clip-higher (DAPO) and dual clip (Ye et al. 2020)."""
    log_ratio_T = log_ratio(terms)
    loss_T, clipped_T = clipped_surrogate(terms.advantages_T, log_ratio_T.exp(), settings)
    bound_T = -terms.advantages_T * settings.clip_dual
    bounded_T = (terms.advantages_T < 0) & (loss_T > bound_T)
    parts_T = clip_parts(clipped_T, log_ratio_T) | {"actor/pg_clipfrac_lower": bounded_T.float()}
    return TokenLoss(torch.where(bounded_T, bound_T, loss_T), parts_T)


def clipped_surrogate(advantage_T: Tensor, ratio_T: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), and where the clipped term is the larger one."""
    plain_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.maximum(plain_T, clipped_T), clipped_T > plain_T


def sapo(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Soft adaptive policy optimisation (Gao et al. 2025): a gate instead of a clip, -A (4 / tau) sigmoid(tau (r - 1)).

    At r = 1 its slope is that of -A r; away from 1 the gradient decays, faster for a negative advantage.
    """
    log_ratio_T = log_ratio(terms)
    tau_T = torch.full_like(log_ratio_T, settings.tau_neg).masked_fill(terms.advantages_T > 0, settings.tau_pos)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (log_ratio_T.exp() - 1))
    return TokenLoss(-terms.advantages_T * gate_T, ratio_parts(log_ratio_T))


def gpg(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Group policy gradient (Chu et al. 2025): plain REINFORCE, -A log p."""
    return TokenLoss(-terms.advantages_T * terms.logprobs_T, ratio_parts(log_ratio(terms)))


def cispo(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Clipped importance-sampling weights (MiniMax-M1, 2025): REINFORCE weighted by clip(r), which is detached.

    The clip bounds the weight, so every token keeps a gradient.
    """
    log_ratio_T = log_ratio(terms)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(-weight_T * terms.advantages_T * terms.logprobs_T, clip_parts(weight_T != ratio_T, log_ratio_T))


# Losses with one ratio per answer. d is log r of a token.


def gspo(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Group sequence policy optimisation (Zheng et al. 2025), in its token form.

    The ratio is s = exp(mean d) for all tokens of an answer; its gradient flows through each token's own log-prob. If
    all tokens of an answer have one advantage, this is the gradient of the sequence form.
    """
    return with_answer_ratio(terms, settings, terms.sample_mean(log_ratio(terms)))


def sequence_ratio(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """PPO's surrogate with an answer as one action, in the token form of gspo: the ratio is s = exp(sum d).

    With the aggregation seq-mean-token-sum its gradient is that of RLOO (Ahmadian et al. 2024) as TRL computes it.
    """
    total_T = terms.sample_sum(terms.logprobs_T.detach() - terms.old_logprobs_T)
    return with_answer_ratio(terms, settings, total_T.clamp(-20, 20))


def with_answer_ratio(terms: LossTerms, settings: LossSettings, answer_log_ratio_T: Tensor) -> TokenLoss:
    own_T = terms.logprobs_T - terms.logprobs_T.detach()  # value 0, gradient 1
    ratio_T = (answer_log_ratio_T.detach() + own_T).exp()
    loss_T, clipped_T = clipped_surrogate(terms.advantages_T, ratio_T, settings)
    return TokenLoss(loss_T, clip_parts(clipped_T, log_ratio(terms)))


def geo_mean(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """Geometric-mean policy optimisation (Zhao et al. 2025): -A exp(mean of clipped d).

    Each d is clipped on the side to which the advantage pushes it. The clip range is in log space. The clip fractions
    count every d outside the range: `pg_clipfrac` for positive advantages, `pg_clipfrac_lower` for negative ones.
    """
    log_ratio_T = log_ratio(terms)
    held_T = log_ratio_T.clamp(-settings.clip_low, settings.clip_high)
    positive_T, negative_T = terms.advantages_T > 0, terms.advantages_T < 0
    kept_T = torch.where(negative_T, torch.maximum(log_ratio_T, held_T), torch.minimum(log_ratio_T, held_T))
    loss_T = -terms.advantages_T * terms.sample_mean(kept_T).exp()
    outside_T = held_T != log_ratio_T
    lower_T = {"actor/pg_clipfrac_lower": (outside_T & negative_T).float()}
    return TokenLoss(loss_T, clip_parts(outside_T & positive_T, log_ratio_T) | lower_T)


# Losses that restrain the tokens which lower the entropy most, those whose advantage and log-prob vary together (Cui et
# al. 2025). They are chosen over the whole mini-batch, before it is split, by the log-probs of the old policy.


def clip_cov(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """PPO's clipped surrogate; the loss of the chosen tokens is 0."""
    assert terms.chosen_T is not None  # the entry has `choose`
    log_ratio_T = log_ratio(terms)
    loss_T, clipped_T = clipped_surrogate(terms.advantages_T, log_ratio_T.exp(), settings)
    return TokenLoss(loss_T.where(~terms.chosen_T, 0), clip_parts(clipped_T | terms.chosen_T, log_ratio_T))


def kl_cov(terms: LossTerms, settings: LossSettings) -> TokenLoss:
    """-A r, plus ppo_kl_coef * |d| for the chosen tokens."""
    assert terms.chosen_T is not None  # the entry has `choose`
    log_ratio_T = log_ratio(terms)
    penalty_T = (settings.ppo_kl_coef * log_ratio_T.abs()).where(terms.chosen_T, 0)
    return TokenLoss(-terms.advantages_T * log_ratio_T.exp() + penalty_T, ratio_parts(log_ratio_T))


def choose_for_clip_cov(batch: TrainBatch, settings: LossSettings) -> Tensor:
    """A share clip_cov_ratio of the tokens, from those whose covariance lies between the two bounds.

    The paper draws them at random. Here they are taken at even steps along the sorted covariances: this does not depend
    on the order of the samples and needs no random state.
    """
    covariance_T = covariances(batch)
    between_T = batch.loss_mask_T & (covariance_T > settings.clip_cov_lb) & (covariance_T < settings.clip_cov_ub)
    place_C = between_T.nonzero().squeeze(1)
    place_C = place_C[covariance_T[place_C].argsort(stable=True)]
    count = min(share_of_tokens(settings.clip_cov_ratio, batch), len(place_C))
    step = (torch.arange(count, device=place_C.device) + 0.5) * len(place_C) / max(count, 1)
    return mask_of(batch, place_C[step.long()])


def choose_for_kl_cov(batch: TrainBatch, settings: LossSettings) -> Tensor:
    """The share kl_cov_ratio of the tokens with the largest covariance; a covariance of 0 or less is never chosen."""
    covariance_T = covariances(batch)
    place_C = (batch.loss_mask_T & (covariance_T > 0)).nonzero().squeeze(1)
    order_C = covariance_T[place_C].argsort(descending=True, stable=True)
    return mask_of(batch, place_C[order_C[: share_of_tokens(settings.kl_cov_ratio, batch)]])


def covariances(batch: TrainBatch) -> Tensor:
    assert batch.old_logprobs_T is not None  # needs_old_logprobs
    mask_T, advantage_T, logprob_T = batch.loss_mask_T, batch.advantages_T.double(), batch.old_logprobs_T.double()
    return (advantage_T - masked_mean(advantage_T, mask_T)) * (logprob_T - masked_mean(logprob_T, mask_T))


def share_of_tokens(ratio: float, batch: TrainBatch) -> int:
    """`ratio` times the tokens in the loss; at least one if there are any."""
    tokens = int(batch.loss_mask_T.sum())
    return min(max(int(ratio * tokens), 1), tokens)


def mask_of(batch: TrainBatch, places: Tensor) -> Tensor:
    return torch.zeros_like(batch.mask_T).index_fill(0, places, True)
