"""verl's advantage functions under verl's names, for code that imports them. rloom itself uses `rloom.algos`.

All tensors are padded, of shape (batch, response length); `index` has an entry for each row, equal for the answers to
one prompt. Results are (advantages, returns), 0 outside the mask. One difference to verl: an answer without another
answer to its prompt has advantage 0, where verl's grpo returns its score.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.algos import estimators
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings
from rloom.algos.kl import kl_estimator
from rloom.algos.registry import Estimator
from rloom.batch import Batch

Padded = tuple[Tensor, Tensor]


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Padded:
    """Generalised advantage estimation; the advantages are whitened."""
    settings = AdvantageSettings(gamma=float(gamma), lam=float(lam))
    return padded(estimators.gae, token_level_rewards, response_mask, settings=settings, values=values, whitened=True)


def outcome(estimator: Estimator, *, whitened: bool = False) -> Callable[..., Padded]:
    """The function of verl whose advantage comes from the rewards and the groups of the answers alone."""

    def advantage(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Hashable], config: Any = None
    ) -> Padded:
        return padded(estimator, token_level_rewards, response_mask, index, whitened=whitened)

    return advantage


def divided_outcome(estimator: Estimator) -> Callable[..., Padded]:
    """As `outcome`, divided by the standard deviation of the group if `norm_adv_by_std_in_grpo`."""

    def advantage(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Sequence[Hashable],
        norm_adv_by_std_in_grpo: bool = True,
        config: Any = None,
    ) -> Padded:
        settings = AdvantageSettings(norm_by_std=norm_adv_by_std_in_grpo)
        return padded(estimator, token_level_rewards, response_mask, index, settings=settings)

    return advantage


# the formulas are in rloom/algos/estimators.py
compute_rloo_outcome_advantage = outcome(estimators.rloo)
compute_opo_outcome_advantage = outcome(estimators.opo)
compute_gpg_outcome_advantage = outcome(estimators.gpg)
compute_reinforce_plus_plus_baseline_outcome_advantage = outcome(estimators.reinforce_plus_plus_baseline, whitened=True)
compute_grpo_outcome_advantage = divided_outcome(estimators.grpo)
compute_grpo_passk_outcome_advantage = divided_outcome(estimators.grpo_passk)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> Padded:
    """The discounted return of each token, whitened over the batch."""
    settings = AdvantageSettings(gamma=gamma)
    return padded(estimators.reinforce_plus_plus, token_level_rewards, response_mask, settings=settings, whitened=True)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None
) -> Padded:
    """The return minus `reward_baselines`, the score of the greedy answer to each row's prompt."""
    return padded(estimators.remax, token_level_rewards, response_mask, greedy=reward_baselines)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The KL of each token by the estimator of that name: kl, abs, mse, low_var_kl, ..."""
    return kl_estimator(kl_penalty)(logprob, ref_logprob)


def padded(
    estimator: Estimator,
    rewards: Tensor,
    mask: Tensor,
    index: Sequence[Hashable] | None = None,
    *,
    settings: AdvantageSettings | None = None,
    values: Tensor | None = None,
    greedy: Tensor | None = None,
    whitened: bool = False,
) -> Padded:
    """`estimator` on padded tensors: rows of one length are a packed batch, and the mask leaves the padding out."""
    rows, length = rewards.shape
    batch = packed(rewards, mask, index)
    values_T = None if values is None else values.reshape(-1)
    with torch.no_grad():
        inputs = AdvantageInputs(batch, rewards.reshape(-1), values_T, greedy)
        found = estimator(inputs, settings or AdvantageSettings())
        if whitened:
            found = estimators.normalized(found, batch)
    return found.advantages_T.view(rows, length), found.returns_T.view(rows, length)


def packed(rewards: Tensor, mask: Tensor, index: Sequence[Hashable] | None) -> Batch:
    rows, length = rewards.shape
    keep = mask.bool()
    numbers: dict[Hashable, int] = {}
    groups = range(rows) if index is None else [numbers.setdefault(name, len(numbers)) for name in index]
    return Batch(
        tokens_T=torch.zeros(rows * length, dtype=torch.long, device=rewards.device),
        mask_T=keep.reshape(-1),
        rollout_logprobs_T=torch.zeros(rows * length, device=rewards.device),
        length_N=torch.full((rows,), length, device=rewards.device),
        group_N=torch.tensor(list(groups), device=rewards.device),
        score_N=rewards.where(keep, 0).sum(-1),
        valid_N=torch.ones(rows, dtype=torch.bool, device=rewards.device),
    )
