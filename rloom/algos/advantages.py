"""What every advantage estimator takes and gives. T tokens, N samples.

An estimator is a pure function `(evidence, settings) -> Advantages`. Samples whose score failed take no part in it:
they enter no mean and get advantage 0.
"""

from dataclasses import dataclass

from torch import Tensor

from rloom.algos.packed import Groups, sum_by_sample
from rloom.batch import Advantages, Batch


@dataclass(frozen=True)
class AdvantageSettings:
    gamma: float = 1.0
    lam: float = 0.95
    norm_by_std: bool = True


@dataclass(frozen=True)
class AdvantageInputs:
    """All that is known of a step when advantages are taken. What an entry of the catalogue did not ask for is None."""

    batch: Batch
    rewards_T: Tensor  # score at the last token written, minus the KL where that is in the reward
    values_T: Tensor | None = None  # iff needs_critic
    greedy_N: Tensor | None = None  # iff needs_greedy: score of the greedy answer to the prompt; NaN where it failed

    @property
    def return_N(self) -> Tensor:
        """R, a sample's rewards summed. In float64: equal returns then have exactly their own mean."""
        batch = self.batch
        return sum_by_sample(self.rewards_T.double().where(batch.mask_T, 0), batch.sample_T, len(batch))


def broadcast_to_tokens(inputs: AdvantageInputs, groups: Groups, advantage_N: Tensor) -> Advantages:
    """Outcome estimators give every token of an answer one advantage: 0 where there is nothing to compare it with."""
    batch = inputs.batch
    known_N = advantage_N.where(groups.comparable_N, 0).to(inputs.rewards_T.dtype)
    advantages_T = known_N[batch.sample_T] * batch.loss_mask_T
    return Advantages(advantages_T, advantages_T)
