"""The reward of a run: a weighted mix of named parts, or one part alone."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloom.errors import CheckpointError, RewardError, TrainingError
from rloom.rewards.base import ScoreQueue
from rloom.types import ENVIRONMENT_FAILED, Score, is_usable

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


PartScores = Sequence[Score]  # of one answer: one for each part


@dataclass(frozen=True)
class MixedPart:
    name: str
    queue: ScoreQueue
    weight: float = 1.0
    normalize: bool = False  # by the running mean and standard deviation of this part
    skip_failed: bool = False  # if this part fails, the others of the same sign count with its weight
    optional: bool = False  # a row to which it does not apply has the sum of the other parts, as in TRL
    by_turns: bool = False  # it is the sum of rewards that the turns of an episode have


class CompositeReward:
    def __init__(self, parts: Sequence[MixedPart]) -> None:
        self.parts = parts
        self.moments = {part.name: Moments() for part in parts if part.normalize}
        self._alone = len(parts) == 1 and parts[0].weight == 1 and not parts[0].normalize

    def update(self, rows: Sequence[PartScores]) -> None:
        """Add the scores of a training step to the running moments."""
        for index, part in enumerate(self.parts):
            if part.normalize:
                values = [row[index].value for row in rows]
                self.moments[part.name] = self.moments[part.name].updated([v for v in values if v is not None])

    def combine(self, row: PartScores) -> Score:
        """One score of the scores of all parts. A part alone is unchanged."""
        if self._alone:
            return row[0]
        found = _Weighted()
        for part, score in zip(self.parts, row, strict=True):
            if score.value is not None:
                found.add(part, score, self._normalized(part, score.value))
            elif part.optional and not score.applies:
                found.skipped_failures.append(f"{part.name}: {score.reason}")
            elif part.skip_failed:
                found.skip(part, score)
            else:
                found.failures.append(f"{part.name}: {score.reason}")
        return found.score()

    @property
    def turn_weight(self) -> float:
        """What a reward of a turn counts in the score. A part that is normalized counts as a whole, at the end."""
        return sum(part.weight for part in self.parts if part.by_turns and not part.normalize)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for part in self.parts:
            prefix = "reward" if self._alone else f"reward/{part.name}"
            found |= {f"{prefix}/{name}": value for name, value in part.queue.metrics().items()}
        for name, moments in self.moments.items():
            found |= {f"reward/{name}/running_mean": moments.mean, f"reward/{name}/running_std": moments.std}
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {name: [m.count, m.mean, m.squares] for name, m in self.moments.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """A part that the saved run did not have, or did not normalize, starts from the beginning."""
        for name in self.moments.keys() & state.keys():
            try:
                count, mean, squares = state[name]
                found = Moments(int(count), float(mean), float(squares))
                if not (found.count >= 0 and is_usable(found.mean) and 0 <= found.squares < math.inf):
                    raise ValueError
                self.moments[name] = found
            except (TypeError, ValueError, OverflowError):
                raise CheckpointError(
                    f"the checkpoint's running moments of {name} cannot be read ({state[name]!r}); "
                    "use another checkpoint"
                ) from None

    def _normalized(self, part: MixedPart, value: float) -> float:
        return self.moments[part.name].normalized(value) if part.normalize else value


@dataclass
class _Sum:
    """The weighted sum of the parts whose weights have one sign."""

    total: float = 0.0
    present: float = 0.0  # sum of the absolute weights of the parts that have a value
    skipped: float = 0.0

    @property
    def spread(self) -> float:
        """The parts that are there also count with the weights of those that were skipped."""
        return self.total * ((self.present + self.skipped) / self.present) if self.present else 0.0


@dataclass
class _Weighted:
    """The sum of the parts of one answer.

    The weight of a skipped part goes to parts of the same sign only: if a penalty's weight went to the others, an
    answer would gain by making the penalty fail.
    """

    rewards: _Sum = field(default_factory=_Sum)
    penalties: _Sum = field(default_factory=_Sum)
    parts: dict[str, float] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped_failures: list[str] = field(default_factory=list)
    prediction: str | None = None

    def add(self, part: MixedPart, score: Score, value: float) -> None:
        assert score.value is not None
        signed = self._sum(part)
        signed.total += part.weight * value
        signed.present += abs(part.weight)
        self.parts[part.name] = score.value
        if part.normalize:
            self.parts[f"{part.name}/normalized"] = value
        if part.skip_failed:
            self.parts[f"{part.name}/skipped"] = 0.0
        for name, further in score.parts.items():
            # the accuracy of a rule stays the accuracy of the whole: validation reports it
            self.parts[name if name == "acc" and "acc" not in self.parts else f"{part.name}/{name}"] = further
        if self.prediction is None:
            self.prediction = score.prediction
        if score.detail is not None:
            self.details.append(f"{part.name}: {score.detail}")

    def skip(self, part: MixedPart, score: Score) -> None:
        self._sum(part).skipped += abs(part.weight)
        self.parts[f"{part.name}/skipped"] = 1.0
        self.skipped_failures.append(f"{part.name}: {score.reason}")

    def score(self) -> Score:
        if self.failures or not (self.rewards.present or self.penalties.present):
            return Score.failed("; ".join(self.failures or self.skipped_failures))
        return Score.of(
            self.rewards.spread + self.penalties.spread,
            self.parts,
            subject="the weighted sum of the parts",
            prediction=self.prediction,
            detail="; ".join(self.details) or None,
        )

    def _sum(self, part: MixedPart) -> _Sum:
        return self.penalties if part.weight < 0 else self.rewards


_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")
REASONS_SHOWN = 5


def check_failures(scores: Sequence[Score], max_failed_share: float) -> None:
    """Stop the run where more than `max_failed_share` of the scores failed, with the reasons."""
    failed = sum(not score.ok for score in scores)
    if not failed or failed <= max_failed_share * len(scores):
        return
    environments = sum((score.reason or "").startswith(ENVIRONMENT_FAILED) for score in scores)
    error, advice = (
        (TrainingError, "Correct the environment, the tools or the agent, or allow a larger share.")
        if environments > failed / 2
        else (RewardError, "Mend the reward function or the rows it fails on, or allow a larger share.")
    )
    raise error(
        f"{failed} of {len(scores)} rewards failed ({failed / len(scores):.1%}), "
        f"more than reward_model.max_failed_share={max_failed_share:g} allows. Most common, each with one example:\n"
        + "\n".join(f"  {line}" for line in common_reasons(scores))
        + f"\n{advice}"
    )


def common_reasons(scores: Sequence[Score]) -> list[str]:
    """The most common reasons, each with its count and an example."""
    groups = _by_kind([score.reason for score in scores if score.reason is not None])
    lines = [f"{len(group)} × {group[0]}" for group in groups[:REASONS_SHOWN]]
    if len(groups) > REASONS_SHOWN:
        lines.append(f"and {len(groups) - REASONS_SHOWN} other reasons")
    return lines


def _by_kind(reasons: Sequence[str]) -> list[list[str]]:
    """Reasons that differ only in numbers and quoted values together, the largest group first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        groups[_DETAIL.sub("…", reason)].append(reason)
    return sorted(groups.values(), key=len, reverse=True)
