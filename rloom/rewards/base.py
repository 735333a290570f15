"""The reward role: samples in, scores out."""

from collections.abc import Sequence
from typing import Protocol

from rloom.types import Sample, Score


class Reward(Protocol):
    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One Score a sample, in order. What went wrong with a sample is its `Score.failed`, never an exception."""

    def close(self) -> None: ...
