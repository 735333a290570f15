"""Validation: answer the held-out prompts and say how well."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rloom.batch import Trajectory
from rloom.observe.accuracy import validation_metrics
from rloom.rollout.base import Sampling
from rloom.trainer.sampling import Sampler
from rloom.types import Prompt


@dataclass(frozen=True)
class Evaluator:
    prompts: Sequence[Prompt]
    sampler: Sampler
    sampling: Sampling
    n: int
    prompts_at_once: int | None

    def answer(self, step: int, progress: Callable[[int, int], None]) -> list[Trajectory]:
        """All held-out prompts, some at a time; how many changes no answer."""
        size = self.prompts_at_once or len(self.prompts)
        total = len(self.prompts) * self.n
        trajectories: list[Trajectory] = []
        for first in range(0, len(self.prompts), size):
            done = len(trajectories)

            def advance(count: int, _: int, done: int = done) -> None:
                progress(done + count, total)

            part = self.prompts[first : first + size]
            written = self.sampler.write(part, self.n, self.sampling, f"validate/{step}", advance, first_row=done)
            trajectories += written.scored(lambda count, _: None)
        return trajectories

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        scores = [np.nan if t.score.accuracy is None else t.score.accuracy for t in trajectories]
        predictions = [t.score.prediction for t in trajectories]
        return validation_metrics(
            [prompt.data_source for prompt in self.prompts],
            np.array(scores).reshape(len(self.prompts), self.n),
            [predictions[i : i + self.n] for i in range(0, len(predictions), self.n)],
        )
