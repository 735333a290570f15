"""What the checks read of a run: metrics of each step, keys, events. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rloom.algos.needs import ESTIMATORS
from rloom.diagnosis.series import Series
from rloom.observe.events import Event
from rloom.observe.run_folder import RunFolder, flat_config

FEWEST_STEPS = 5  # a check of a level, such as a reward that is always 0
FEWEST_CERTAIN = 8  # the same, for the warning of a running run

ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
SCORE = "critic/score/mean"
RESPONSE_LENGTH = "response_length/mean"


@dataclass(frozen=True)
class History:
    metrics: Sequence[Mapping[str, float]]  # one mapping a step, with "step"; step 0: the validation before training
    config: Mapping[str, Any]  # with dotted keys
    events: Sequence[Event] = ()

    @classmethod
    def of(cls, run: RunFolder) -> "History":
        return cls(run.metrics, flat_config(run.config), run.events)

    def series(self, *names: str) -> Series:
        """Of the first name that was measured, over training steps; a value that is not finite is left out."""
        for name in names:
            found = [
                (int(record["step"]), record[name])
                for record in self.metrics
                if name in record and record["step"] > 0 and math.isfinite(record[name])
            ]
            if found:
                steps, values = zip(*found, strict=True)
                return Series(steps, values)
        return Series()

    @property
    def steps(self) -> list[int]:
        """Of training."""
        return [int(record["step"]) for record in self.metrics if record["step"] > 0]

    @property
    def names(self) -> set[str]:
        return {name for record in self.metrics for name in record}

    @property
    def validation(self) -> Series:
        """Mean accuracy of all data sources; the validation before training has step 0."""
        found = {
            int(record["step"]): [
                value for name, value in record.items() if name.startswith("val-core/") and "/acc/" in name
            ]
            for record in self.metrics
        }
        measured = {step: fmean(values) for step, values in found.items() if values}
        return Series(tuple(measured), tuple(measured.values()))

    def matching(self, prefix: str, suffix: str) -> dict[str, Series]:
        names = {name for name in self.names if name.startswith(prefix) and name.endswith(suffix)}
        return {name: self.series(name) for name in sorted(names)}

    def number(self, key: str, default: float) -> float:
        """Of a key. A run of an older version, or one without config.yaml, may lack it."""
        value = self.config.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default

    @property
    def estimator(self) -> str:
        return str(self.config.get("algorithm.adv_estimator", ""))

    @property
    def compares_answers(self) -> bool:
        """The advantage of an answer comes from the other answers to its prompt."""
        return self.estimator in ESTIMATORS and ESTIMATORS[self.estimator].min_group > 1

    @property
    def updates_per_step(self) -> int:
        """Of the policy."""
        prompts = self.number("data.train_batch_size", 1)
        mini = self.number(f"{ACTOR}.ppo_mini_batch_size", prompts)
        return math.ceil(prompts / max(mini, 1)) * int(self.number(f"{ACTOR}.ppo_epochs", 1))

    @property
    def answers_per_step(self) -> int:
        return int(self.number("data.train_batch_size", 1) * self.number(f"{ROLLOUT}.n", 1))

    @property
    def end(self) -> Event | None:
        """None: it has not ended, or its process was killed."""
        last = next((event for event in reversed(self.events) if event["event"] in ("run", "end")), None)
        return last if last is not None and last["event"] == "end" else None

    @property
    def score_rises(self) -> bool:
        trend = self.series(SCORE).trend
        return trend is not None and trend.rises

    def sums(self, prefix: str) -> dict[str, float]:
        """Totals over all steps, by what follows the prefix."""
        found: dict[str, float] = defaultdict(float)
        for record in self.metrics:
            for name, value in record.items():
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] += value
        return dict(found)


def rounded(value: float) -> float:
    """To one significant digit: a value to try."""
    return float(f"{value:.1g}")


def figures(series: Series) -> str:
    """`0.31 (step 3), 0.42 (step 4), 0.4 (step 5)`: at most three, the last ones."""
    shown = zip(series.steps[-3:], series.values[-3:], strict=True)
    return ", ".join(f"{value:.3g} (step {step})" for step, value in shown)
