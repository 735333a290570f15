"""The catalogue: a name -> the function and what it needs. Adding an algorithm is one function and one line here."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rloom.algos import advantages, policy_losses
from rloom.algos.advantages import AdvantageSettings
from rloom.algos.policy_losses import PolicyLoss
from rloom.batch import Advantages, Batch

Estimator = Callable[[Batch, Tensor, Tensor | None, AdvantageSettings], Advantages]


@dataclass(frozen=True)
class Algorithm:
    advantage: Estimator
    needs_critic: bool = False
    min_group: int = 1  # fewest answers to a prompt that it can compare


ALGORITHMS: dict[str, Algorithm] = {
    "gae": Algorithm(advantages.gae, needs_critic=True),
    "rloo": Algorithm(advantages.rloo, min_group=2),
    "grpo": Algorithm(advantages.grpo, min_group=2),
}

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": policy_losses.vanilla,
}
