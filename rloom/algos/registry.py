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
from rloom.plugins import check_two_arguments, resolve

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


# the function of an entry has its name; `choose_for_NAME`, if there is one, chooses tokens for its loss
ALGORITHMS: dict[str, Algorithm] = {
    name: Algorithm(vars(estimators)[name], **vars(needs)) for name, needs in ESTIMATORS.items()
}

POLICY_LOSSES: dict[str, PolicyLossEntry] = {
    name: PolicyLossEntry(vars(policy_losses)[name], vars(policy_losses).get(f"choose_for_{name}"), **vars(needs))
    for name, needs in LOSSES.items()
}


def resolve_algorithm(name: str) -> Algorithm:
    """The entry of that name. A user's plain function gets the default requirements; an Algorithm declares its own."""
    found = resolve(ESTIMATOR_KEY, name, ALGORITHMS, ESTIMATOR_GROUP)
    if isinstance(found, Algorithm):
        return found
    check_two_arguments(ESTIMATOR_KEY, name, found, "(inputs, settings)", "an Algorithm")
    return Algorithm(found)


def resolve_policy_loss(name: str) -> PolicyLossEntry:
    """The entry of that name. A user's plain function gets the default requirements; a PolicyLossEntry its own."""
    found = resolve(LOSS_KEY, name, POLICY_LOSSES, LOSS_GROUP)
    if isinstance(found, PolicyLossEntry):
        return found
    check_two_arguments(LOSS_KEY, name, found, "(terms, settings)", "a PolicyLossEntry")
    return PolicyLossEntry(found)
