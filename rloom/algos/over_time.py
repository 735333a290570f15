"""Estimators that look at the tokens of one answer in time: gae, reinforce_plus_plus, remax."""

from torch import Tensor

from rloom.algos.advantages import AdvantageInputs, AdvantageSettings
from rloom.algos.packed import Actions, whiten
from rloom.batch import Advantages, Batch


def gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016), whitened over the batch."""
    assert inputs.values_T is not None  # needs_critic
    mask_T = inputs.batch.loss_mask_T
    advantages_T = unwhitened_gae(inputs, settings)
    return Advantages(whiten(advantages_T, mask_T), advantages_T + inputs.values_T.where(mask_T, 0))


def unwhitened_gae(inputs: AdvantageInputs, settings: AdvantageSettings) -> Tensor:
    """A_t = delta_t + gamma * lam * A_{t+1}, with delta_t = r_t + gamma * V_{t+1} - V_t; not whitened."""
    assert inputs.values_T is not None  # needs_critic
    actions = Actions.of(inputs.batch)
    reward_A, value_A = actions.pick(inputs.rewards_T), actions.pick(inputs.values_T)
    delta_A = reward_A.add_(actions.following(value_A), alpha=settings.gamma).sub_(value_A)
    return actions.put_back(actions.discounted_sum(delta_A, settings.gamma * settings.lam))


def reinforce_plus_plus(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """REINFORCE++ (Hu 2025): the discounted return of each token, whitened over the batch. No critic, no group."""
    returns_T = returns_to_go(inputs, settings.gamma)
    return Advantages(whiten(returns_T, inputs.batch.loss_mask_T), returns_T)


def remax(inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
    """ReMax (Li et al. 2024): the return, less the score of the greedy answer to the same prompt.

    The greedy score is discounted over the same distance as the sample's own score, to the last token: with any gamma,
    an answer that scores as the greedy one does has advantage 0 at every token.
    """
    assert inputs.greedy_N is not None  # needs_greedy
    batch = inputs.batch
    returns_T = returns_to_go(inputs, settings.gamma)
    baseline_T = inputs.greedy_N.to(returns_T.dtype)[batch.sample_T] * distance_discounts(batch, settings.gamma)
    known_T = batch.loss_mask_T & baseline_T.isfinite()  # a failed greedy score is no baseline
    return Advantages((returns_T - baseline_T).where(known_T, 0), returns_T)


def distance_discounts(batch: Batch, gamma: float) -> Tensor:
    """gamma^k for the token with k tokens of the policy's after it in its answer; 0 where the policy did not write."""
    actions = Actions.of(batch)
    last_A = actions.following(actions.pick(batch.loss_mask_T).to(batch.score_N.dtype)) == 0
    return actions.put_back(actions.discounted_sum(last_A.to(batch.score_N.dtype), gamma))


def returns_to_go(inputs: AdvantageInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1}; tokens that the policy did not write are skipped, not discounted."""
    actions = Actions.of(inputs.batch)
    return actions.put_back(actions.discounted_sum(actions.pick(inputs.rewards_T), gamma))
