"""The registry of estimators and policy losses: name -> function and requirements.

needs.py lists what each entry requires and reads, without torch. A name with a colon, `my_module:my_function` or
`./my_file.py:my_function`, is the user's own; so is the name of an entry point of an installed package.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rloom.algos import estimators, policy_losses
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, normalized
from rloom.algos.needs import (
    ESTIMATOR_GROUP,
    ESTIMATOR_KEY,
    ESTIMATORS,
    LOSS_GROUP,
    LOSS_KEY,
    LOSSES,
    EstimatorNeeds,
    LossNeeds,
)
from rloom.algos.policy_losses import LossSettings, PolicyLoss
from rloom.batch import Advantages, TrainBatch
from rloom.plugins import check_two_arguments, load_own

Estimator = Callable[[AdvantageInputs, AdvantageSettings], Advantages]


@dataclass(frozen=True)
class Algorithm(EstimatorNeeds):
    advantage: Estimator

    def estimate(self, inputs: AdvantageInputs, settings: AdvantageSettings) -> Advantages:
        """The advantages of a whole step, normalised if the estimator or the settings require it."""
        found = self.advantage(inputs, settings)
        normalizes = self.normalizes if settings.normalize is None else settings.normalize
        return normalized(found, inputs.batch) if normalizes else found


@dataclass(frozen=True)
class PolicyLossEntry(LossNeeds):
    loss: PolicyLoss
    choose: Callable[[TrainBatch, LossSettings], Tensor] | None = None  # mini-batch -> chosen_T, before it is split


def estimator(name: str, advantage: Estimator) -> Algorithm:
    return Algorithm(advantage, **vars(ESTIMATORS[name]))


def policy_loss(
    name: str, loss: PolicyLoss, choose: Callable[[TrainBatch, LossSettings], Tensor] | None = None
) -> PolicyLossEntry:
    return PolicyLossEntry(loss, choose, **vars(LOSSES[name]))


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
    found = load_own(ESTIMATOR_KEY, name, ALGORITHMS, ESTIMATOR_GROUP)
    if isinstance(found, Algorithm):
        return found
    check_two_arguments(ESTIMATOR_KEY, name, found, "(inputs, settings)", "an Algorithm")
    return Algorithm(found)


def resolve_policy_loss(name: str) -> PolicyLossEntry:
    """The entry of that name. A user's plain function gets the default requirements; a PolicyLossEntry its own."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    found = load_own(LOSS_KEY, name, POLICY_LOSSES, LOSS_GROUP)
    if isinstance(found, PolicyLossEntry):
        return found
    check_two_arguments(LOSS_KEY, name, found, "(terms, settings)", "a PolicyLossEntry")
    return PolicyLossEntry(found)
