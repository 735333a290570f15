"""One metric over the steps of a run. A trend compares its beginning with its end, in units of its own scatter."""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import correlation, fmean, median

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
        return math.sqrt(fmean(change**2 for change in self.changes.values()) / 2)

    @property
    def changes(self) -> dict[int, float]:
        """From one step to the next, by the later step. Not across the steps that a running run no longer keeps."""
        gaps = [after - before for before, after in pairwise(self.steps)]
        usual = median(gaps) if gaps else 0
        return {
            step: after - before
            for gap, step, (before, after) in zip(gaps, self.steps[1:], pairwise(self.values), strict=True)
            if gap <= usual
        }

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


def correlation_of_changes(one: Series, other: Series) -> float:
    """Of the changes from step to step, which leaves slow trends out. 0 if either does not vary."""
    changes = other.changes
    pairs = [(change, changes[step]) for step, change in one.changes.items() if step in changes]
    first, second = [change for change, _ in pairs], [change for _, change in pairs]
    if len(set(first)) < 2 or len(set(second)) < 2:
        return 0.0
    return correlation(first, second)
