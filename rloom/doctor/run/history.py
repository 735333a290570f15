"""What the checks read of a run: metrics of each step, keys, events, answers. Imports no torch.

A trend compares the beginning of a metric with its end, in units of its own scatter.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from statistics import correlation, fmean, median
from typing import Any

from rloom.algos.needs import ESTIMATORS, EstimatorNeeds
from rloom.algos.ranges import ACTOR, CRITIC, ROLLOUT, UNREADABLE, Unusual, model_entries, model_path, unusual_values
from rloom.doctor.run.samples import Samples
from rloom.runs.records import Event, finite
from rloom.runs.run_folder import RunFolder, flat_config

__all__ = ["ACTOR", "CRITIC", "ROLLOUT"]
FEWEST_OF_A_TREND = 9  # three values at the beginning, three at the end, and steps between
SURE = 2.0  # a change of this many standard errors is not chance

FEWEST_STEPS = 5  # a check of a level, such as a reward that is always 0
FEWEST_CERTAIN = 8  # the same, for the warning of a running run

SCORE = "critic/score/mean"
RESPONSE_LENGTH = "response_length/mean"


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

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, float]]) -> "Series":
        """`pairs`: (step, value)."""
        kept = list(pairs)
        return cls(tuple(step for step, _ in kept), tuple(value for _, value in kept))

    @property
    def pairs(self) -> Iterator[tuple[int, float]]:
        """(step, value)"""
        return zip(self.steps, self.values, strict=True)

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
        return Series.of(pair for pair in self.pairs if pair[0] > step)

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


@dataclass(frozen=True)
class History:
    metrics: Sequence[Mapping[str, float]]  # one mapping a step, with "step"; step 0: the validation before training
    config: Mapping[str, Any]  # with dotted keys
    events: Sequence[Event] = ()
    read_samples: Callable[[], Samples] = Samples

    @classmethod
    def of(cls, run: RunFolder) -> "History":
        return cls(run.metrics, flat_config(run.config), run.events, partial(Samples.of, run.path))

    @cached_property
    def samples(self) -> Samples:
        """Answers of some steps; reading and scoring them takes a while."""
        return self.read_samples()

    @cached_property
    def unusual(self) -> list[Unusual]:
        """Values of keys outside of the range in which they are known to work."""
        return unusual_values(self.config)

    @cached_property
    def columns(self) -> dict[str, Series]:
        """Each metric over the steps that have it; a value that is not finite is left out."""
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for record in self.metrics:
            for name, value in record.items():
                if name != "step" and math.isfinite(value):
                    found[name].append((int(record["step"]), value))
        return {name: Series.of(pairs) for name, pairs in found.items()}

    def series(self, *names: str) -> Series:
        """Of the first name that was measured, over training steps."""
        found = next((self.columns[name] for name in names if name in self.columns), Series())
        return found if not len(found) or found.steps[0] > 0 else found.after(0)

    @cached_property
    def steps(self) -> list[int]:
        """Of training."""
        return [int(record["step"]) for record in self.metrics if record["step"] > 0]

    @cached_property
    def validation(self) -> Series:
        """Mean accuracy of all data sources; the validation before training has step 0."""
        found: dict[int, list[float]] = defaultdict(list)
        for name, series in self.columns.items():
            if name.startswith("val-core/") and "/acc/" in name:
                for step, value in series.pairs:
                    found[step].append(value)
        return Series.of((step, fmean(found[step])) for step in sorted(found))

    def matching(self, prefix: str, suffix: str = "") -> dict[str, Series]:
        names = [name for name in self.columns if name.startswith(prefix) and name.endswith(suffix)]
        return {name: self.series(name) for name in sorted(names)}

    def number(self, key: str, default: float) -> float:
        """Of a key. A run of an older version, or one without config.yaml, may lack it."""
        value = finite(self.config.get(key))
        return default if value is None else value

    @property
    def is_supervised(self) -> bool:
        """A run of `rloom sft`."""
        return "optim.lr" in self.config

    @property
    def estimator(self) -> str:
        return str(self.config.get("algorithm.adv_estimator", ""))

    @property
    def estimator_needs(self) -> EstimatorNeeds:
        """Those of a user's own estimator are not known here."""
        return ESTIMATORS.get(self.estimator, EstimatorNeeds())

    @property
    def compares_answers(self) -> bool:
        """The advantage of an answer comes from the other answers to its prompt."""
        return self.estimator_needs.min_group > 1

    @property
    def warmup(self) -> int:
        """The last step in which only the critic is trained: until then nothing can rise."""
        return int(self.number("trainer.critic_warmup", 0))

    @property
    def updates_per_step(self) -> int:
        """Of the policy."""
        prompts = self.number("data.train_batch_size", 1)
        mini = self.number(f"{ACTOR}.ppo_mini_batch_size", prompts)
        return math.ceil(prompts / max(mini, 1)) * int(self.number(f"{ACTOR}.ppo_epochs", 1))

    @property
    def answers_per_step(self) -> int | None:
        """None: not known, because the run has no config.yaml."""
        prompts, answers = self.number("data.train_batch_size", 0), self.number(f"{ROLLOUT}.n", 1)
        return int(prompts * answers) if prompts else None

    @property
    def has_first_step(self) -> bool:
        """Not so if the run continued from a checkpoint of another one: whether the reward has risen is not known."""
        return bool(self.steps) and self.steps[0] == 1

    @property
    def end(self) -> Event | None:
        """None: it has not ended, or its process was killed."""
        last = next((event for event in reversed(self.events) if event["event"] in ("run", "end")), None)
        return last if last is not None and last["event"] == "end" else None

    @cached_property
    def score_rises(self) -> bool:
        """Since the first step, or since the policy is trained: a long warm-up of the critic would hide the rise."""
        score = self.series(SCORE)
        return any(trend is not None and trend.rises for trend in (score.trend, score.after(self.warmup).trend))

    @cached_property
    def score_place(self) -> float | None:
        """The mean score of the last third of the steps between the lowest (0) and the highest (1) of all answers."""
        low, high, score = (self.series(f"critic/score/{name}") for name in ("min", "max", "mean"))
        if not (len(low) and len(high) and len(score)) or max(high.values) <= min(low.values):
            return None
        return (score.tail.mean - min(low.values)) / (max(high.values) - min(low.values))

    @property
    def has_own_reward(self) -> bool:
        """A function, a reward model, a judge or a server scores the answers, not a built-in rule."""
        switches = ("reward_model.enable", "reward_model.api.enable", "reward_model.remote.enable")
        return self.config.get("custom_reward_function.path") is not None or any(map(self.config.get, switches))

    @cached_property
    def correctness(self) -> Series:
        """Share of right answers of a step, measured apart from the score: by the reward's own `acc`, else by the
        built-in rule of the data source on the answers of some steps. Empty: the score itself is all there is."""
        own, score = self.series("reward/acc"), self.series(SCORE)
        if len(own):
            return own if own.values != score.values else Series()
        if not self.has_own_reward or not self.samples.by_rule:
            return Series()
        return Series.of(sorted(self.samples.right_by_step.items()))

    @property
    def scores_are_accuracies(self) -> bool:
        """Training and validation measure the same: the score of a rule that is right or wrong, or of a function."""
        own = self.series("reward/acc")
        if len(own):
            return own.values == self.series(SCORE).values
        return self.config.get("custom_reward_function.path") is not None

    def largest(self, name: str) -> tuple[int, float] | None:
        """Step and value of the largest amount of a metric."""
        return max(self.series(name).pairs, key=lambda pair: abs(pair[1]), default=None)


def rounded(value: float) -> float:
    """To one significant digit: a value to try."""
    return float(f"{value:.1g}")


def figures(series: Series) -> str:
    """`0.31 (step 3), 0.42 (step 4), 0.4 (step 5)`: at most three, the last ones."""
    return ", ".join(f"{value:.3g} (step {step})" for step, value in [*series.pairs][-3:])


def context(history: History) -> float:
    """Tokens of the model, by its config.json."""
    try:
        length = float(model_entries(model_path(history.config))["max_position_embeddings"])
        return length if length > 0 else math.inf
    except UNREADABLE:
        return 512.0 if model_path(history.config) == "embedded" else math.inf
