"""What the algorithm of a configuration needs, without torch.

What a user brings as file.py:name is not run here: it is taken to need a critic where `critic.enable` says so, and to
read every setting.
"""

from dataclasses import dataclass
from typing import Protocol

from rloom.algos.needs import ESTIMATOR_KEY, ESTIMATORS, LOSS_KEY, LOSSES, EstimatorNeeds, LossNeeds, unknown_entry
from rloom.config.schema import Config


class Estimator(Protocol):
    @property
    def needs_critic(self) -> bool: ...
    @property
    def min_group(self) -> int: ...
    @property
    def needs_greedy(self) -> bool: ...
    @property
    def reads(self) -> frozenset[str]: ...


class Loss(Protocol):
    @property
    def needs_old_logprobs(self) -> bool: ...
    @property
    def reads(self) -> frozenset[str]: ...


@dataclass(frozen=True)
class Needs:
    """Of a run's estimator and loss: entries of the catalogue, or what is declared of them."""

    estimator: Estimator
    loss: Loss


def declared_needs(config: Config) -> Needs:
    estimator, loss = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if ":" not in estimator and estimator not in ESTIMATORS:
        raise unknown_entry(ESTIMATOR_KEY, estimator, ESTIMATORS)
    if ":" not in loss and loss not in LOSSES:
        raise unknown_entry(LOSS_KEY, loss, LOSSES)
    own = EstimatorNeeds(needs_critic=bool(config.critic.enable))
    return Needs(ESTIMATORS.get(estimator, own), LOSSES.get(loss, LossNeeds()))


def brings_own_algorithm(config: Config) -> bool:
    """An estimator or a loss of the user's: its needs are known once its file has been loaded."""
    return ":" in config.algorithm.adv_estimator or ":" in config.actor_rollout_ref.actor.policy_loss.loss_mode


def needs_old_logprobs(config: Config, loss: Loss) -> bool:
    """Not when the policy that learns is exactly the one that wrote, unless something else looks at them."""
    asked = config.kl_in_reward or config.algorithm.rollout_correction.enabled
    return not config.on_policy or loss.needs_old_logprobs or asked
