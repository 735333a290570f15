"""What the checks read of a run: metrics of each step, keys, events. Imports no torch."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from rloom.algos.needs import ESTIMATORS, EstimatorNeeds
from rloom.doctor.run.series import Series
from rloom.runs.records import Event, finite
from rloom.runs.run_folder import RunFolder, flat_config

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

    @cached_property
    def columns(self) -> dict[str, Series]:
        """Each metric over the steps that have it; a value that is not finite is left out."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for record in self.metrics:
            step = int(record["step"])
            for name, value in record.items():
                if math.isfinite(value):
                    steps, values = found.setdefault(name, ([], []))
                    steps.append(step)
                    values.append(value)
        return {name: Series(tuple(steps), tuple(values)) for name, (steps, values) in found.items() if name != "step"}

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
                for step, value in zip(series.steps, series.values, strict=True):
                    found[step].append(value)
        return Series(tuple(sorted(found)), tuple(fmean(found[step]) for step in sorted(found)))

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
        trend = self.series(SCORE).trend
        return trend is not None and trend.rises


def rounded(value: float) -> float:
    """To one significant digit: a value to try."""
    return float(f"{value:.1g}")


def figures(series: Series) -> str:
    """`0.31 (step 3), 0.42 (step 4), 0.4 (step 5)`: at most three, the last ones."""
    shown = zip(series.steps[-3:], series.values[-3:], strict=True)
    return ", ".join(f"{value:.3g} (step {step})" for step, value in shown)
