"""Rules and users' functions, run in processes of their own."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.messages import Setup, encode
from rloom.rewards.process import WorkerDied, WorkerProcess
from rloom.rewards.routing import call_limit_s
from rloom.types import Sample, SampleGroup, Score

LOAD_LIMIT_S = 120.0  # a user's file may import torch from a slow disk

_Job = tuple[SampleGroup, "Future[list[Score]]"]


class RulePool:
    """A Reward over `num_workers` processes: by the rules, or by the function `name` of the file `path`.

    Each process has a thread here that sends it samples, so the pool works with any event loop and closes without one.
    A call that takes longer than `timeout_s` fails, and its process is replaced; other samples are not affected.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        timeout_s: float,
        path: str | None = None,
        name: str = "compute_score",
        reward_kwargs: Mapping[str, Any] | None = None,
        whole_groups: bool = False,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        if num_workers < 1:
            raise RewardError(f"num_workers={num_workers}: rewards are computed in worker processes; use 1 or more")
        self._setup = Setup(path, name, dict(reward_kwargs or {}), whole_groups, timeout_s, LOAD_LIMIT_S, sandbox)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers = [_Worker(self._setup, self._jobs) for _ in range(num_workers)]
        self._lock = threading.Lock()
        self._started = False
        self._closed = False

    @property
    def whole_groups(self) -> bool:
        return self._setup.whole_groups

    def check(self) -> None:
        """Load the user's file in a worker, as scoring will. RewardError says what is wrong with it."""
        if self._setup.path is None:
            return
        process = WorkerProcess(self._setup)
        try:
            process.load()
        finally:
            process.close()

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        self._start()
        futures = [self._submit(group) for group in groups]
        return await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))

    def close(self) -> None:
        """End all workers. What is still waiting becomes a failed score."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.stop()
        for _ in self._workers:
            self._jobs.put(None)
        if self._started:
            for worker in self._workers:
                worker.join()

    def _start(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("this RulePool is closed")
            if not self._started:
                for worker in self._workers:
                    worker.start()
                self._started = True

    def _submit(self, group: SampleGroup) -> "Future[list[Score]]":
        future: Future[list[Score]] = Future()
        self._jobs.put((group, future))
        return future


class _Worker(threading.Thread):
    """A thread that takes samples from the queue, and its process, which is replaced when it fails.

    A daemon, so that a run that dies without closing the pool is not kept alive by it.
    """

    def __init__(self, setup: Setup, jobs: "SimpleQueue[_Job | None]") -> None:
        super().__init__(name="reward-worker", daemon=True)
        self._setup = setup
        self._jobs = jobs
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._stopping = False

    def run(self) -> None:
        while (job := self._jobs.get()) is not None:
            group, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._score(group))
            except BaseException as error:  # an error of rloom: raised where the score is waited for
                future.set_exception(error)
        self._end_process(grace=True)

    def stop(self) -> None:
        """From another thread: interrupt the current call; what waits fails."""
        with self._lock:
            self._stopping = True
            if self._process is not None:
                self._process.interrupt()

    def _score(self, group: SampleGroup) -> list[Score]:
        def failed(reason: str) -> list[Score]:
            return [Score.failed(reason)] * len(group)

        limit_s = call_limit_s(self._setup, group)
        try:
            request = encode(tuple(_as_sent(sample) for sample in group))
        except Exception as error:  # pickle raises errors of many types
            return failed(f"this row cannot be sent to a reward worker: {type(error).__name__}: {error}")
        try:
            return self._running_process().score(request, limit_s)
        except TimeoutError:
            self._end_process(grace=False)
            return failed(
                f"timed out after {_named(limit_s, self._setup)} "
                f"(data_source={group[0].data_source!r}, a response of {len(group[0].response)} characters); "
                "its worker was replaced"
            )
        except (WorkerDied, RewardError) as error:
            self._end_process(grace=False)
            return failed("the reward was closed before this sample was scored" if self._stopping else str(error))

    def _running_process(self) -> WorkerProcess:
        with self._lock:
            if self._stopping:
                raise WorkerDied
            if self._process is not None:
                return self._process
            self._process = process = WorkerProcess(self._setup)
        process.load()
        return process

    def _end_process(self, *, grace: bool) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.close() if grace else process.close(grace_s=0)


def _named(limit_s: float, setup: Setup) -> str:
    """The limit with its key."""
    return f"reward_model.timeout_s={limit_s:g} s" if limit_s == setup.timeout_s else f"{limit_s:g} s"


def _as_sent(sample: Sample) -> Sample:
    """Without what a reward function is not given."""
    return replace(sample, extra_info=dict(sample.extra_info), messages=(), prompt_tokens=(), response_tokens=())
