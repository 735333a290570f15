"""The reward protocols: groups of samples in, scores out."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Protocol

from rloom.types import SampleGroup, Score


class ScoringUnit(Enum):
    """The answers that a reward has to receive together. They are submitted as soon as the unit is complete."""

    ANSWER = "answer"  # each answer on its own
    PROMPT = "prompt"  # all answers to a prompt, to compare them
    BATCH = "batch"  # all answers of one generation, such as for a model on the workers that generate


class Reward(Protocol):
    @property
    def unit(self) -> ScoringUnit: ...

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        """A Score for each sample of each group, in order. A failure is a `Score.failed`, not an exception.

        A RewardError stops the run, such as when a budget is spent.
        """

    def check(self) -> None:
        """Raise a RewardError if it cannot be used. Called once, before anything is generated."""

    def metrics(self) -> Mapping[str, float]:
        """Of the calls since the last `metrics`: requests, tokens, cost."""

    def close(self) -> None: ...


class PendingScores(Protocol):
    """Scores that may still be computed. A Future is one."""

    def result(self) -> list[list[Score]]:
        """Waits. One list for each group that was submitted."""

    def add_done_callback(self, callback: "Callable[[Future[list[list[Score]]]], object]", /) -> None:
        """Called, in any thread, with each part that is complete or has failed; not by those that `result` computes."""


class ScoreQueue(Protocol):
    """A reward that runs beside the caller."""

    @property
    def unit(self) -> ScoringUnit: ...

    def submit(self, groups: Sequence[SampleGroup]) -> PendingScores: ...

    def metrics(self) -> Mapping[str, float]:
        """As in Reward."""
