"""Estimators that compare the answers to one prompt. R is a sample's return, mean and std are those of its group."""

import torch

from rloom.algos.advantages import AdvantageInputs, AdvantageSettings, broadcast_to_tokens
from rloom.algos.packed import Groups, sum_by_sample, whiten
from rloom.batch import Advantages

EPSILON = 1e-6


def rloo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """REINFORCE leave-one-out (Ahmadian et al. 2024): R_i - mean(R_j, j != i) = n / (n - 1) * (R_i - mean)."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    scale_N = groups.count_N / (groups.count_N - 1).clamp(min=1)
    return broadcast_to_tokens(inputs, groups, scale_N * (return_N - groups.mean(return_N)))


def grpo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Group-relative advantage (Shao et al. 2024); without the std it is Dr. GRPO's (Liu et al. 2025)."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    centred_N = return_N - groups.mean(return_N)
    if settings.norm_by_std:
        centred_N = centred_N / (groups.std(return_N) + EPSILON)
    return broadcast_to_tokens(inputs, groups, centred_N)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """REINFORCE++-baseline (Hu et al. 2025): R - mean, whitened over the tokens of the whole batch."""
    batch, groups, return_N = inputs.batch, Groups.of(inputs.batch), inputs.return_N
    centred_N = (return_N - groups.mean(return_N)).to(inputs.rewards_T.dtype)
    compared_T = batch.loss_mask_T & groups.comparable_N[batch.sample_T]
    advantages_T = whiten(centred_N[batch.sample_T], compared_T)
    return Advantages(advantages_T, advantages_T)


def opo(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """On-policy RL with the optimal baseline (Hao et al. 2025): the group's mean, weighted by length."""
    batch, groups, return_N = inputs.batch, Groups.of(inputs.batch), inputs.return_N
    length_N = sum_by_sample(batch.mask_T.to(return_N.dtype), batch.sample_T, len(batch))
    baseline_N = groups.total(length_N * return_N) / groups.total(length_N).clamp(min=1)
    return broadcast_to_tokens(inputs, groups, return_N - baseline_N)


def gpg(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Group policy gradient (Chu et al. 2025): R - mean, scaled up for the samples that earned nothing."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    valid_N = inputs.batch.valid_N
    scale = valid_N.sum() / ((return_N != 0) & valid_N).sum().clamp(min=1)
    return broadcast_to_tokens(inputs, groups, scale * (return_N - groups.mean(return_N)))


def grpo_passk(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Pass@k as the goal (Tang et al. 2025): only the best of a group learns, by how far it leads the second best."""
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    best_N = return_N == groups.largest(return_N)
    alone_N = groups.total(best_N.long()) == 1  # a shared first place leads by nothing
    second_N = groups.largest(return_N.where(~best_N, -torch.inf))
    lead_N = (return_N - second_N).where(best_N & alone_N & groups.comparable_N, 0)
    if settings.norm_by_std:
        lead_N = lead_N / (groups.std(return_N) + EPSILON)
    return broadcast_to_tokens(inputs, groups, lead_N)
