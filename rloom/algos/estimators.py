"""Advantage estimators, and the reward shaping of DAPO. T tokens, N samples, G groups.

An estimator is a pure function `(inputs, settings) -> Advantages`. Samples whose score failed enter no mean and get
advantage 0. `normalized` follows the estimator, if the estimator or `algorithm.normalize_advantages` requires it.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rloom.algos.packed import Actions, Groups, whiten
from rloom.batch import Advantages, Batch, sample_returns, sum_by_episode

EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageSettings:
    gamma: float = 1.0
    lam: float = 0.95
    norm_by_std: bool | Literal["batch"] = True  # batch: by the standard deviation of all returns of the step
    normalize: bool | None = None  # after the estimator; None: as the estimator is defined


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of an estimator. Those that its registry entry does not require are None."""

    batch: Batch  # with the penalty of over-long answers in its scores
    rewards_T: Tensor  # score at the last generated token, minus the KL if it is part of the reward
    values_T: Tensor | None = None  # iff needs_critic
    greedy_N: Tensor | None = None  # iff needs_greedy: score of the greedy answer to the prompt; NaN if it failed

    @property
    def return_N(self) -> Tensor:
        """R, the sum of a sample's rewards."""
        return sample_returns(self.batch, self.rewards_T)


def broadcast_to_tokens(inputs: AdvantageInputs, groups: Groups, advantage_N: Tensor) -> Advantages:
    """Give every token of an answer the same advantage; 0 if the group has no other valid answer."""
    batch = inputs.batch
    known_N = advantage_N.where(groups.comparable_N, 0).to(inputs.rewards_T.dtype)
    loss_mask_T = batch.loss_mask_T
    advantages_T = batch.at_tokens(known_N) * loss_mask_T
    return Advantages(advantages_T, advantages_T, loss_mask_T & batch.at_tokens(groups.comparable_N))


def normalized(found: Advantages, batch: Batch) -> Advantages:
    """(A - mean) / std over the tokens with an estimate. `batch`: the whole step, of all ranks. Returns are kept."""
    mask_T = batch.loss_mask_T if found.estimated_T is None else found.estimated_T
    return replace(found, advantages_T=whiten(found.advantages_T, mask_T))


# Estimators over the tokens of one answer


def gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016): A_t = delta_t + gamma * lam * A_{t+1}, with
    delta_t = r_t + gamma * V_{t+1} - V_t."""
    assert inputs.values_T is not None  # needs_critic
    actions = Actions.of(inputs.batch)
    reward_A, value_A = actions.pick(inputs.rewards_T), actions.pick(inputs.values_T)
    delta_A = reward_A.add_(actions.following(value_A), alpha=settings.gamma).sub_(value_A)
    advantages_T = actions.put_back(actions.discounted_sum(delta_A, settings.gamma * settings.lam))
    return Advantages(advantages_T, advantages_T + inputs.values_T.where(inputs.batch.loss_mask_T, 0))


def reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """REINFORCE++ (Hu 2025): the discounted return of each token. No critic, no group."""
    returns_T = returns_to_go(inputs, settings.gamma)
    return Advantages(returns_T, returns_T)


def remax(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """ReMax (Li et al. 2024): the return minus the score of the greedy answer to the same prompt.

    The greedy score is discounted over the same distance as the sample's own score, to the last token: for every gamma,
    an answer with the score of the greedy one has advantage 0 at every token.
    """
    assert inputs.greedy_N is not None  # needs_greedy
    batch = inputs.batch
    returns_T = returns_to_go(inputs, settings.gamma)
    baseline_T = batch.at_tokens(inputs.greedy_N.to(returns_T.dtype)) * distance_discounts(batch, settings.gamma)
    known_T = batch.loss_mask_T & baseline_T.isfinite()  # a failed greedy score is no baseline
    return Advantages((returns_T - baseline_T).where(known_T, 0), returns_T, known_T)


def distance_discounts(batch: Batch, gamma: float) -> Tensor:
    """gamma^k for the token with k generated tokens after it in its answer; 0 for tokens that were not generated."""
    actions = Actions.of(batch)
    last_A = actions.following(actions.pick(batch.loss_mask_T).to(batch.score_N.dtype)) == 0
    return actions.put_back(actions.discounted_sum(last_A.to(batch.score_N.dtype), gamma))


def returns_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1}; tokens that the policy did not generate are skipped, not discounted."""
    actions = Actions.of(inputs.batch)
    return actions.put_back(actions.discounted_sum(actions.pick(inputs.rewards_T), gamma))


# Estimators over the answers to one prompt. R is a sample's return; mean and std are those of its group.


def rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al. 2024): R_i - mean(R_j, j != i) = n / (n - 1) * (R_i - mean)."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    scale_N = groups.count_N / (groups.count_N - 1).clamp(min=1)
    return broadcast_to_tokens(inputs, groups, scale_N * (return_N - groups.mean(return_N)))


def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Group-relative advantage (Shao et al. 2024); without the std it is Dr. GRPO's (Liu et al. 2025)."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    centred_N = return_N - groups.mean(return_N)
    return broadcast_to_tokens(inputs, groups, centred_N / spread(groups, return_N, settings))


def spread(groups: Groups, return_N: Tensor, settings: AdvantageSettings) -> Tensor:
    """The divisor of the advantages: the standard deviation of a group or of the whole step, or 1."""
    if settings.norm_by_std == "batch":
        groups = replace(groups, member_N=torch.zeros_like(groups.member_N), size=1)
    return groups.std(return_N) + EPSILON if settings.norm_by_std else torch.ones_like(return_N)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """REINFORCE++-baseline (Hu et al. 2025): R - mean."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    return broadcast_to_tokens(inputs, groups, return_N - groups.mean(return_N))


def opo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """On-policy RL with the optimal baseline (Hao et al. 2025): the group's mean, weighted by length."""
    batch, groups, return_N = inputs.batch, Groups.of(inputs.batch), inputs.return_N
    length_N = sum_by_episode(batch.counts(batch.mask_T).to(return_N.dtype), batch)
    baseline_N = groups.total(length_N * return_N) / groups.total(length_N).clamp(min=1)
    return broadcast_to_tokens(inputs, groups, return_N - baseline_N)


def gpg(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Group policy gradient (Chu et al. 2025): R - mean, times the number of samples over those with R != 0."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    counted_N = groups.counted_N
    scale = counted_N.sum() / ((return_N != 0) & counted_N).sum().clamp(min=1)
    return broadcast_to_tokens(inputs, groups, scale * (return_N - groups.mean(return_N)))


def grpo_passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Pass@k as the objective (Tang et al. 2025): the best of a group gets its lead over the second best, others 0."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    best_N = return_N == groups.largest(return_N)
    alone_N = groups.total(best_N.long()) == 1  # two equal best samples have no lead
    second_N = groups.largest(return_N.where(~best_N, -torch.inf))
    lead_N = (return_N - second_N).where(best_N & alone_N & groups.comparable_N, 0)
    return broadcast_to_tokens(inputs, groups, lead_N / spread(groups, return_N, settings))


# What changes scores before the estimator, and dynamic sampling: DAPO (Yu et al. 2025)


@dataclass(frozen=True)
class Overlong:
    """DAPO's penalty on answers that are close to the length limit."""

    max_length: int
    buffer: int
    factor: float


@dataclass(frozen=True)
class Shaping:
    overlong: Overlong | None = None
    truncated: float | None = None  # answers that ended at a limit: 0 or more is a factor, less than 0 is their score
    score_range: tuple[float, float] | None = None

    def scores(self, batch: Batch) -> Tensor:
        """score_N with the penalties on long and on truncated answers, then limited to the range."""
        score_N = batch.score_N + self.penalty(batch)
        if self.truncated is not None and batch.finished_N is not None:
            cut_N = score_N * self.truncated if self.truncated >= 0 else torch.full_like(score_N, self.truncated)
            score_N = score_N.where(batch.finished_N, cut_N)
        return score_N if self.score_range is None else score_N.clamp(*self.score_range)

    def penalty(self, batch: Batch) -> Tensor:
        if self.overlong is None:
            return torch.zeros_like(batch.score_N)
        length_N, over = batch.answer_length_N.float(), self.overlong
        return overlong_penalty(length_N, over.max_length, over.buffer, over.factor)


def overlong_penalty(answer_length_N: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Added to the score of a long answer: falls from 0 to -factor over the last `buffer` tokens of `max_length`."""
    over_N = (answer_length_N - (max_length - buffer)) / buffer
    return -factor * over_N.clamp(0, 1)


def informative_groups(score_N: Tensor, group_N: Tensor, valid_N: Tensor) -> Tensor:
    """Which groups, in ascending order of `group_N`, have two different valid scores. All others have advantage 0."""
    names, member_N = torch.unique(group_N, return_inverse=True)
    empty_G = score_N.new_full((len(names),), torch.inf)
    lowest_G = empty_G.scatter_reduce(0, member_N, score_N.where(valid_N, torch.inf), "amin")
    highest_G = (-empty_G).scatter_reduce(0, member_N, score_N.where(valid_N, -torch.inf), "amax")
    return lowest_G < highest_G
