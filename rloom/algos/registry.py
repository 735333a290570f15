"""The registry of estimators and policy losses: name -> function and requirements.

needs.py lists what each entry requires and reads, without torch. A name with a colon, `my_module:my_function` or
`./my_file.py:my_function`, is the user's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rloom.algos import estimators, policy_losses
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, normalized
from rloom.algos.needs import (
    ESTIMATOR_KEY,
    ESTIMATOR_SETTINGS,
    ESTIMATORS,
    LOSS_KEY,
    LOSS_SETTINGS,
    LOSSES,
    unknown_entry,
)
from rloom.algos.plugins import check_two_arguments, load_plugin
from rloom.algos.policy_losses import LossSettings, PolicyLoss
from rloom.batch import Advantages, TrainBatch

Estimator = Callable[[AdvantageInputs, AdvantageSettings], Advantages]


@dataclass(frozen=True)
class Algorithm:
    advantage: Estimator
    needs_critic: bool = False
    min_group: int = 1
    needs_greedy: bool = False
    normalizes: bool = False
    reads: frozenset[str] = ESTIMATOR_SETTINGS  # keys of `algorithm` that change its result

    def estimate(self, inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
        """The advantages of a whole step, normalised if the estimator or the settings require it."""
        found = self.advantage(inputs, settings)
        normalizes = self.normalizes if settings.normalize is None else settings.normalize
        return normalized(found, inputs.batch) if normalizes else found


@dataclass(frozen=True)
class PolicyLossEntry:
    loss: PolicyLoss
    needs_old_logprobs: bool = False
    aggregation: str | None = None
    weighs_answers: bool = False
    choose: Callable[[TrainBatch, LossSettings], Tensor] | None = None  # mini-batch -> chosen_T, before it is split
    reads: frozenset[str] = LOSS_SETTINGS  # keys of `actor` and `actor.policy_loss` that change its result


def estimator(name: str, advantage: Estimator) -> Algorithm:
    return Algorithm(advantage, **vars(ESTIMATORS[name]))


def policy_loss(
    name: str, loss: PolicyLoss, choose: Callable[[TrainBatch, LossSettings], Tensor] | None = None
) -> PolicyLossEntry:
    return PolicyLossEntry(loss, choose=choose, **vars(LOSSES[name]))


ALGORITHMS: dict[str, Algorithm] = {
    "gae": estimator("gae", estimators.gae),
    "rloo": estimator("rloo", estimators.rloo),
    "grpo": estimator("grpo", estimators.grpo),
    "reinforce_plus_plus": estimator("reinforce_plus_plus", estimators.reinforce_plus_plus),
    "reinforce_plus_plus_baseline": estimator("reinforce_plus_plus_baseline", estimators.reinforce_plus_plus_baseline),
    "remax": estimator("remax", estimators.remax),
    "opo": estimator("opo", estimators.opo),
    "gpg": estimator("gpg", estimators.gpg),
    "grpo_passk": estimator("grpo_passk", estimators.grpo_passk),
}

POLICY_LOSSES: dict[str, PolicyLossEntry] = {
    "vanilla": policy_loss("vanilla", policy_losses.vanilla),
    "gspo": policy_loss("gspo", policy_losses.gspo),
    "sapo": policy_loss("sapo", policy_losses.sapo),
    "gpg": policy_loss("gpg", policy_losses.gpg),
    "cispo": policy_loss("cispo", policy_losses.cispo),
    "clip_cov": policy_loss("clip_cov", policy_losses.clip_cov, policy_losses.choose_for_clip_cov),
    "kl_cov": policy_loss("kl_cov", policy_losses.kl_cov, policy_losses.choose_for_kl_cov),
    "geo_mean": policy_loss("geo_mean", policy_losses.geo_mean),
}


def resolve_algorithm(name: str) -> Algorithm:
    """The entry of that name. A user's plain function gets the default requirements; an Algorithm declares its own."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    found = plugin(ESTIMATOR_KEY, name, list(ALGORITHMS))
    if isinstance(found, Algorithm):
        return found
    check_two_arguments(ESTIMATOR_KEY, name, found, "(inputs, settings)", "an Algorithm")
    return Algorithm(found)


def resolve_policy_loss(name: str) -> PolicyLossEntry:
    """The entry of that name. A user's plain function gets the default requirements; a PolicyLossEntry its own."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    found = plugin(LOSS_KEY, name, list(POLICY_LOSSES))
    if isinstance(found, PolicyLossEntry):
        return found
    check_two_arguments(LOSS_KEY, name, found, "(terms, settings)", "a PolicyLossEntry")
    return PolicyLossEntry(found)


def plugin(key: str, name: str, known: list[str]) -> Any:
    if ":" not in name:
        raise unknown_entry(key, name, known)
    return load_plugin(key, name)
