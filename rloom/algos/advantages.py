"""Advantage estimators: rewards in, advantages out. T tokens, N samples.

Each has the signature `(batch, rewards_T, values_T, settings) -> Advantages` and reads like its paper. Samples whose
score failed take no part: they enter no mean and get advantage 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.algos.packed import ActionGrid, group_stats, sum_by_sample, whiten
from rloom.batch import Advantages, Batch

EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageSettings:
    gamma: float = 1.0
    lam: float = 0.95
    norm_by_std: bool = True


def gae(batch: Batch, rewards_T: Tensor, values_T: Tensor | None, settings: AdvantageSettings) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016), whitened over the batch."""
    assert values_T is not None  # needs_critic
    mask_T = batch.loss_mask_T
    grid = ActionGrid.of(mask_T, batch.sample_T, len(batch))
    reward_NA, value_NA = grid.spread(rewards_T), grid.spread(values_T)
    advantage_NA = torch.zeros_like(reward_NA)
    next_value_N = next_advantage_N = reward_NA.new_zeros(len(batch))
    for a in reversed(range(grid.width)):
        delta_N = reward_NA[:, a] + settings.gamma * next_value_N - value_NA[:, a]
        next_advantage_N = delta_N + settings.gamma * settings.lam * next_advantage_N
        advantage_NA[:, a] = next_advantage_N
        next_value_N = value_NA[:, a]
    advantages_T = grid.gather(advantage_NA)
    return Advantages(whiten(advantages_T, mask_T), advantages_T + values_T * mask_T)


def rloo(batch: Batch, rewards_T: Tensor, values_T: Tensor | None, settings: AdvantageSettings) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al. 2024): R_i - mean(R_j, j != i) = n / (n - 1) * (R_i - mean)."""
    return_N = sample_returns(batch, rewards_T)
    stats = group_stats(return_N, batch.group_N, batch.valid_N)
    scale_N = stats.count_N / (stats.count_N - 1).clamp(min=1)
    return one_number_a_sample(batch, scale_N * (return_N - stats.mean_N) * stats.comparable_N)


def grpo(batch: Batch, rewards_T: Tensor, values_T: Tensor | None, settings: AdvantageSettings) -> Advantages:
    """Group-relative advantage (Shao et al. 2024); without the std it is Dr. GRPO's (Liu et al. 2025)."""
    return_N = sample_returns(batch, rewards_T)
    stats = group_stats(return_N, batch.group_N, batch.valid_N)
    centred_N = (return_N - stats.mean_N) * stats.comparable_N
    return one_number_a_sample(batch, centred_N / (stats.std_N + EPSILON) if settings.norm_by_std else centred_N)


def sample_returns(batch: Batch, rewards_T: Tensor) -> Tensor:
    return sum_by_sample(rewards_T * batch.mask_T, batch.sample_T, len(batch))


def one_number_a_sample(batch: Batch, advantage_N: Tensor) -> Advantages:
    """Outcome estimators give every token of an answer the same advantage."""
    advantages_T = advantage_N[batch.sample_T] * batch.loss_mask_T
    return Advantages(advantages_T, advantages_T)
