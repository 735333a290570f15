"""Rewards are computed during generation: a sample is scored while others are still being generated."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from rloom.net.loop import EventLoop
from rloom.rewards.base import PendingScores, Reward, ScoreQueue, ScoringUnit
from rloom.types import SampleGroup, Score


class BackgroundScorer:
    """Runs a Reward in an event loop, in a thread of its own. It owns the reward and closes it.

    `loop`: one that the rewards of a run share. They are closed together: the first to be closed ends what all of them
    compute.
    """

    def __init__(self, reward: Reward, loop: EventLoop | None = None) -> None:
        self._reward = reward
        self._loop, self._owns_loop = loop or EventLoop("reward-loop"), loop is None
        self._closed = False

    @property
    def unit(self) -> ScoringUnit:
        return self._reward.unit

    def metrics(self) -> Mapping[str, float]:
        return self._reward.metrics()

    def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
        if self._closed:
            raise RuntimeError("this BackgroundScorer is closed")
        return self._loop.start(self._reward.score(groups))

    def close(self) -> None:
        """Cancel what is still being scored, close the reward, end the thread."""
        if self._closed:
            return
        self._closed = True
        self._loop.cancel_all()
        self._reward.close()
        if self._owns_loop:
            self._loop.close()


class FutureQueue(Protocol):
    """A queue that reports when scores are finished."""

    def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]": ...


@dataclass(frozen=True)
class MergedScores:
    """The scores of groups that several queues share."""

    groups: int
    shares: Sequence[tuple[Sequence[int], PendingScores]]  # indices of the groups of each queue

    def result(self) -> list[list[Score]]:
        found: dict[int, list[Score]] = {}
        for indices, pending in self.shares:
            found.update(zip(indices, pending.result(), strict=True))
        return [found[index] for index in range(self.groups)]

    def done(self) -> bool:
        return all(pending.done() for _, pending in self.shares)

    def add_done_callback(self, callback: "Callable[[Future[list[list[Score]]]], object]", /) -> None:
        for _, pending in self.shares:
            pending.add_done_callback(callback)


class LeastLoaded:
    """A reward on several machines. A group goes to the queue with the fewest unfinished samples."""

    def __init__(self, own: ScoreQueue, queues: Sequence[FutureQueue]) -> None:
        """`own`: this machine's queue of `queues`; its unit and metrics are reported."""
        self._own, self._queues = own, queues
        self._unfinished = [0] * len(queues)
        self._lock = threading.Lock()

    @property
    def unit(self) -> ScoringUnit:
        return self._own.unit

    def metrics(self) -> Mapping[str, float]:
        return self._own.metrics()

    def submit(self, groups: Sequence[SampleGroup]) -> PendingScores:
        shares: dict[int, list[int]] = {}
        with self._lock:
            for index, group in enumerate(groups):
                queue = self._unfinished.index(min(self._unfinished))
                self._unfinished[queue] += len(group)
                shares.setdefault(queue, []).append(index)
        return MergedScores(
            len(groups),
            [(indices, self._start(queue, [groups[index] for index in indices])) for queue, indices in shares.items()],
        )

    def _start(self, queue: int, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
        samples = sum(map(len, groups))

        def finished(_: "Future[list[list[Score]]]") -> None:
            with self._lock:
                self._unfinished[queue] -= samples

        scores = self._queues[queue].submit(groups)
        scores.add_done_callback(finished)
        return scores
