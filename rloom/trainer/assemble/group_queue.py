"""A reward model as the queue of groups that the sampler uses."""

from concurrent.futures import Future

from rloom.rewards.base import Unit
from rloom.trainer.reward_model import ModelQueue, ModelScores
from rloom.types import SampleGroup, Score


class Collected:
    """Groups that are submitted together when the first score is requested."""

    def __init__(self, queue: ModelQueue) -> None:
        self.queue, self.groups = queue, list[SampleGroup]()
        self.scores: ModelScores | None = None

    def result(self) -> list[list[Score]]:
        if self.scores is None:
            self.scores = self.queue.submit(self.groups)
        return self.scores.result()


class GroupScores(Future[list[Score]]):
    def __init__(self, scores: ModelScores | Collected, index: int) -> None:
        super().__init__()
        self.scores, self.index = scores, index

    def result(self, timeout: float | None = None) -> list[Score]:
        return self.scores.result()[self.index]


class GroupQueue:
    whole_groups = True

    def __init__(self, queue: ModelQueue) -> None:
        self.queue, self.collected = queue, Collected(queue)

    def submit(self, group: SampleGroup) -> GroupScores:
        if self.queue.unit is Unit.PROMPT:
            return GroupScores(self.queue.submit([group]), 0)
        if self.collected.scores is not None:
            self.collected = Collected(self.queue)
        self.collected.groups.append(group)
        return GroupScores(self.collected, len(self.collected.groups) - 1)
