"""The reward protocol: groups of samples in, scores out."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from rloom.types import SampleGroup, Score


class Unit(Enum):
    """The answers that a reward has to receive together. They are submitted as soon as the unit is complete."""

    ANSWER = "answer"  # each answer on its own
    PROMPT = "prompt"  # all answers to a prompt, to compare them
    BATCH = "batch"  # all answers of one generation, such as for a model on the workers that generate


class Reward(Protocol):
    @property
    def whole_groups(self) -> bool:
        """Whether a group has to have all answers to its prompt, to compare them. If not, each answer is a group of
        its own and is scored as soon as it is generated."""

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        """A Score for each sample of each group, in order. A failure is a `Score.failed`, never an exception."""

    def check(self) -> None:
        """Raise a RewardError if it cannot be used. Called once, before anything is generated."""

    def close(self) -> None: ...
