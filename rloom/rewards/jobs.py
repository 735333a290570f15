"""Groups that wait for their scores, between the event loop and the threads of the pool."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rloom.types import SampleGroup, Score


class Call:
    """One call of `RulePool.score`. Its result is set when the last of its groups has scores."""

    def __init__(self, groups: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._scores: list[list[Score]] = [[] for _ in range(groups)]
        self._missing = groups
        self._lock = threading.Lock()
        self.result: asyncio.Future[list[list[Score]]] = self._loop.create_future()

    def set_scores(self, index: int, scores: list[Score]) -> None:
        with self._lock:
            self._scores[index] = scores
            self._missing -= 1
            complete = not self._missing
        if complete:
            self._in_loop(self._set_result)

    def set_exception(self, error: BaseException) -> None:
        self._in_loop(partial(self._set_exception, error))

    def _in_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the result
            self._loop.call_soon_threadsafe(callback)

    def _set_result(self) -> None:
        if not self.result.done():  # it may have been cancelled
            self.result.set_result(self._scores)

    def _set_exception(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)


@dataclass(frozen=True)
class Job:
    """A group that waits for its scores."""

    call: Call
    index: int  # in the call
    group: SampleGroup

    def finish(self, scores: list[Score]) -> None:
        self.call.set_scores(self.index, scores)

    def fail(self, reason: str) -> None:
        self.finish([Score.failed(reason)] * len(self.group))


class JobQueue:
    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            self._jobs.extend(jobs)
            self._changed.notify(len(jobs))

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Jobs that a worker took and did not get to: they are the next."""
        with self._changed:
            self._jobs.extendleft(reversed(jobs))
            self._changed.notify(len(jobs))

    def take(self, limit: int) -> list[Job]:
        """The next jobs, when there are any: at most `limit`, and not more than a worker's share of them. None are left
        in a closed queue: []."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            count = max(1, min(limit, len(self._jobs) // self._workers))
            return [self._jobs.popleft() for _ in range(min(count, len(self._jobs)))]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
