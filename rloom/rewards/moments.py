"""Running mean and standard deviation of scores, over a whole run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rloom.types import is_usable

SMALLEST_STD = 1e-6  # of scores that are all equal so far, which are only centred


@dataclass(frozen=True)
class Moments:
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared differences from the mean

    def updated(self, values: Sequence[float]) -> "Moments":
        """With further values. Values are summed in their order, so equal batches give equal moments.

        The squares of values within `is_usable` do not overflow; others are left out.
        """
        values = [value for value in values if is_usable(value)]
        if not values:
            return self
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        count, difference = self.count + len(values), mean - self.mean
        return Moments(
            count,
            self.mean + difference * len(values) / count,
            self.squares + squares + difference**2 * self.count * len(values) / count,
        )

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 1.0

    def normalized(self, value: float) -> float:
        centred = value - self.mean
        return centred / self.std if self.std > SMALLEST_STD else centred
