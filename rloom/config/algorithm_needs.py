"""What the algorithm of a configuration requires, without torch.

A user's own algorithm (file.py:name) is not loaded here. It is assumed to need a critic if `critic.enable` is set, and
to read every setting.
"""

from dataclasses import dataclass
from typing import Protocol

from rloom.algos.needs import ESTIMATOR_KEY, ESTIMATORS, LOSS_KEY, LOSSES, EstimatorNeeds, LossNeeds, unknown_entry
from rloom.config.schema import Config


class HasEstimatorNeeds(Protocol):
    @property
    def needs_critic(self) -> bool: ...
    @property
    def min_group(self) -> int: ...
    @property
    def needs_greedy(self) -> bool: ...
    @property
    def reads(self) -> frozenset[str]: ...


class HasLossNeeds(Protocol):
    @property
    def needs_old_logprobs(self) -> bool: ...
    @property
    def reads(self) -> frozenset[str]: ...


@dataclass(frozen=True)
class Needs:
    """The requirements of a run's estimator and loss: registry entries, or their declarations in algos/needs.py."""

    estimator: HasEstimatorNeeds
    loss: HasLossNeeds


def declared_needs(config: Config) -> Needs:
    estimator, loss = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if ":" not in estimator and estimator not in ESTIMATORS:
        raise unknown_entry(ESTIMATOR_KEY, estimator, ESTIMATORS)
    if ":" not in loss and loss not in LOSSES:
        raise unknown_entry(LOSS_KEY, loss, LOSSES)
    own = EstimatorNeeds(needs_critic=bool(config.critic.enable))
    return Needs(ESTIMATORS.get(estimator, own), LOSSES.get(loss, LossNeeds()))


def brings_own_algorithm(config: Config) -> bool:
    """Whether estimator or loss is the user's own: its requirements are known after its file is loaded."""
    return ":" in config.algorithm.adv_estimator or ":" in config.actor_rollout_ref.actor.policy_loss.loss_mode


def needs_old_logprobs(config: Config, loss: HasLossNeeds) -> bool:
    """An exactly on-policy update needs none, unless the loss, the step's KL or rollout correction reads them."""
    measures_kl = config.kl_in_reward or config.kl_only_measured
    also_read = measures_kl or config.algorithm.rollout_correction.enabled
    return not config.on_policy or loss.needs_old_logprobs or also_read


def measures_mismatch(config: Config) -> bool:
    """Whether the log-probs of rollout engine and trainer are compared."""
    return config.actor_rollout_ref.rollout.calculate_log_probs or config.algorithm.rollout_correction.enabled
