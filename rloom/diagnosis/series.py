"""One metric over the steps of a run. A trend compares its beginning with its end, in units of its own scatter."""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

FEWEST_OF_A_TREND = 9  # three values at the beginning, three at the end, and steps between
SURE = 2.0  # a change of this many standard errors is not chance


@dataclass(frozen=True)
class Trend:
    first: float  # mean of the first third
    last: float  # mean of the last third
    error: float  # standard error of their difference, from the scatter between neighbouring steps

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def rises(self) -> bool:
        return self.change > SURE * self.error and self.change > 0

    @property
    def falls(self) -> bool:
        return self.change < -SURE * self.error and self.change < 0


@dataclass(frozen=True)
class Series:
    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def span(self) -> tuple[int, int]:
        return self.steps[0], self.steps[-1]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def third(self) -> int:
        return max(3, len(self) // 3)

    @property
    def head(self) -> "Series":
        return Series(self.steps[: self.third], self.values[: self.third])

    @property
    def tail(self) -> "Series":
        return Series(self.steps[-self.third :], self.values[-self.third :])

    def after(self, step: int) -> "Series":
        kept = [place for place, number in enumerate(self.steps) if number > step]
        return Series(tuple(self.steps[i] for i in kept), tuple(self.values[i] for i in kept))

    @property
    def scatter(self) -> float:
        """Standard deviation of a single step. Differences of neighbours leave a slow trend out."""
        if len(self) < 2:
            return 0.0
        squares = [(after - before) ** 2 for before, after in pairwise(self.values)]
        return math.sqrt(fmean(squares) / 2)

    @property
    def trend(self) -> Trend | None:
        """None: too few steps."""
        if len(self) < FEWEST_OF_A_TREND:
            return None
        return Trend(self.head.mean, self.tail.mean, self.scatter * math.sqrt(2 / self.third))

    def smoothed(self, width: int) -> "Series":
        """Mean of each `width` neighbours, at the step of the last of them."""
        means = [fmean(self.values[stop - width : stop]) for stop in range(width, len(self) + 1)]
        return Series(self.steps[width - 1 :], tuple(means))
