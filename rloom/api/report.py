"""What a callback gets after each step, and how it stops the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rloom.training.steps import AfterStep


class StopTraining(Exception):
    """Raised by a callback: the step is saved and `rloom.train` returns."""


@dataclass(frozen=True)
class Answer:
    """One answer of a step."""

    prompt: str  # as rendered by the chat template
    text: str
    score: float | None  # None: it failed
    reason: str | None  # of the failure
    ground_truth: Any
    data_source: str


@dataclass(frozen=True)
class StepReport:
    step: int  # the first is 1
    metrics: Mapping[str, float]  # as in metrics.jsonl; with those of the validation, if this step had one
    rows: Callable[[], list[dict[str, Any]]] = field(repr=False)

    @cached_property
    def answers(self) -> list[Answer]:
        """All answers of the step, in the order of the prompts. They are decoded when this is first read."""
        return [
            Answer(row["input"], row["output"], row["score"], row["reason"], row["gts"], row["data_source"])
            for row in self.rows()
        ]


Callback = Callable[[StepReport], bool | None]


def after_step(callbacks: Sequence[Callback]) -> AfterStep:
    """Call all of them. The run stops if one returns False or raises StopTraining."""

    def call(step: int, metrics: Mapping[str, float], rows: Callable[[], list[dict[str, Any]]]) -> bool:
        report = StepReport(step, metrics, rows)
        return all([goes_on(callback, report) for callback in callbacks])

    return call


def goes_on(callback: Callback, report: StepReport) -> bool:
    try:
        return callback(report) is not False
    except StopTraining:
        return False
