"""Validation: answer the held-out prompts and measure the accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rloom.batch import Trajectory, one_for_each
from rloom.episodes.record import episode_metrics
from rloom.rollout.base import Sampling
from rloom.runs.accuracy import validation_metrics
from rloom.runs.measures import measured
from rloom.training.sampling import Sampler
from rloom.training.scoring import Progress
from rloom.types import Prompt


@dataclass(frozen=True)
class Evaluator:
    prompts: Sequence[Prompt]
    sampler: Sampler
    sampling: Sampling
    answers_per_prompt: int
    prompts_at_once: int | None

    def answer(self, step: int, progress: Progress) -> list[Trajectory]:
        """All held-out prompts, some at a time; their number does not change an answer."""
        size = self.prompts_at_once or len(self.prompts)
        total = len(self.prompts) * self.answers_per_prompt
        trajectories: list[Trajectory] = []
        for first in range(0, len(self.prompts), size):
            done = len(trajectories)

            def advance(count: int, _: int, done: int = done) -> None:
                progress(done + count, total)

            part = self.prompts[first : first + size]
            pending = self.sampler.generate(
                part, self.answers_per_prompt, self.sampling, f"validate/{step}", advance, first_group=first
            )
            trajectories += pending.scored(lambda count, _: None)
        return trajectories

    def measures(self, trajectories: Sequence[Trajectory]) -> dict[str, str]:
        """Accuracy or score, by data source."""
        return measured((answer.prompt.data_source, answer.score) for answer in one_for_each(trajectories))

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in one_for_each(trajectories):
            groups.setdefault(trajectory.group, []).append(trajectory)
        scores = [[np.nan if (a := t.score.accuracy) is None else a for t in group] for group in groups.values()]
        episodes = {f"val-aux/{name}": value for name, value in episode_metrics(trajectories).items()}
        return episodes | validation_metrics(
            [group[0].prompt.data_source for group in groups.values()],
            np.array(scores),
            [[t.score.prediction for t in group] for group in groups.values()],
        )
