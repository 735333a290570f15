"""Rules and users' functions, run in processes of their own."""

import asyncio
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from rloom.errors import RewardError
from rloom.net.loop import EventLoop
from rloom.rewards.base import Fields, Request, ScoringUnit, Setup, Style, encode, pickled
from rloom.rewards.routing import call_limit_s, runs_code, wrong_score
from rloom.rewards.rules.limited import HARD_LIMIT_S
from rloom.rewards.worker_process import WorkerDied, WorkerProcess
from rloom.types import Sample, SampleGroup, Score

LOAD_LIMIT_S = 120.0  # a user's file may import torch from a slow disk

# Cheap calls are sent in batches, of about this duration and at most this size: a round trip takes longer than a rule.
# Slow calls, such as programs, are sent one by one, to the worker that is free first.
BATCH_S = 0.01
LARGEST_BATCH = 256
# A program that runs for so long is likely to run into a limit. Another worker takes the place of its worker meanwhile.
LONG_RUN_S = 0.25
# While many replies are missing, several are read at a time: a wake-up takes longer than a reply.
MANY_MISSING = 8
GATHER_S = 0.001

TOO_LONG = f"the answer was not compared: evaluating it took over {HARD_LIMIT_S:g} s"
CLOSED = "the reward was closed before this sample was scored"


class ScoreCall:
    """One call of `RulePool.score`. Its result is set when the last of its groups has scores."""

    def __init__(self, groups: Sequence[SampleGroup]) -> None:
        self.groups = groups
        self.result: asyncio.Future[list[list[Score]]] = asyncio.get_running_loop().create_future()
        self._scores: list[list[Score]] = [[] for _ in groups]
        self._missing = len(groups)

    def finish(self, index: int, scores: list[Score]) -> None:
        self._scores[index] = scores
        self._missing -= 1
        if not self._missing and not self.result.done():  # it may have been cancelled
            self.result.set_result(self._scores)

    def fail(self, index: int, reason: str) -> None:
        self.finish(index, [Score.failed(reason)] * len(self.groups[index]))


Job = tuple[ScoreCall, int]  # a group that waits for its scores: its call and its index there


class RulePool:
    """A Reward over `num_workers` processes: by the rules, or by the function `name` of the file `path`.

    Everything runs in one event loop: that of the queue of scores, or one of its own if `score` is called elsewhere.
    A call that takes longer than `timeout_s` fails, and its process is replaced; other samples are not affected. An
    answer that a rule cannot evaluate in its own limit of CPU time is wrong.

    While programs of some answers run for long, as many spare processes, at most `num_workers`, compute the others. A
    user's function has none: it may hold memory, or be limited to so many calls at a time.
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
        reads_episodes: bool = False,
    ) -> None:
        if num_workers < 1:
            raise RewardError(f"num_workers={num_workers}: rewards are computed in worker processes; use 1 or more")
        kwargs = dict(reward_kwargs or {})
        self._setup = Setup(path, name, kwargs, whole_groups, timeout_s, LOAD_LIMIT_S, sandbox, reads_episodes)
        self._style = Style.ANSWER if path is None else None
        self._waiting: deque[Job] = deque()
        self._num_workers = num_workers
        processes = num_workers if path is not None else 2 * num_workers
        self._workers = [_Worker(self, self._setup, self._waiting) for _ in range(processes)]
        self._scoring: set[asyncio.Task[Any]] = set()
        self._reported = 0  # replaced processes
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._owns_loop = False
        self._closed = False

    @property
    def unit(self) -> ScoringUnit:
        """The signature of a user's function decides it, so the first use loads the file."""
        self.check()
        return ScoringUnit.ANSWER if self._style in (Style.ANSWER, Style.QUERIES) else ScoringUnit.PROMPT

    def check(self) -> None:
        """Load the user's file in a worker, as scoring will. The RewardError names what is wrong with it."""
        if self._style is None:
            with closing(EventLoop("reward-check")) as loop:
                self._style = loop.run(_loaded_style(self._setup))

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        loop = self._started()
        if not groups:
            return []
        if loop.loop is asyncio.get_running_loop():
            return await self._score(groups)
        return await asyncio.wrap_future(loop.start(self._score(groups)))

    def metrics(self) -> dict[str, float]:
        """Of the calls since the last `metrics()`."""
        replaced = sum(worker.replaced for worker in self._workers) - self._reported
        self._reported += replaced
        return {"workers_replaced": float(replaced)}

    def close(self) -> None:
        """End all workers. What is still waiting becomes a failed score. From a thread other than the event loop's."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._loop is not None:
            self._loop.run(self._end())
            if self._owns_loop:
                self._loop.close()

    def _started(self) -> EventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("this RulePool is closed")
            if self._loop is None:
                current = EventLoop.current()
                self._owns_loop = current is None
                self._loop = current or EventLoop("reward-workers")
            return self._loop

    async def _score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        task = asyncio.current_task()
        assert task is not None
        self._scoring.add(task)
        try:
            call = ScoreCall(groups)
            self._waiting.extend((call, index) for index in range(len(groups)))
            self.start_idle()
            return await call.result
        finally:
            self._scoring.discard(task)

    def put_back(self, jobs: Sequence[Job]) -> None:
        self._waiting.extendleft(reversed(jobs))
        self.start_idle()

    @property
    def free_places(self) -> int:
        """How many workers may begin. Below 0: long programs have ended, and as many workers have to."""
        return self._num_workers - sum(worker.is_running and not worker.runs_long for worker in self._workers)

    def share(self) -> int:
        """A worker's share of the groups that wait."""
        return max(1, len(self._waiting) // self._num_workers)

    def start_idle(self) -> None:
        """Start idle workers for the groups that wait. If the pool is closed, these fail."""
        while self._closed and self._waiting:
            call, index = self._waiting.popleft()
            call.fail(index, CLOSED)
        idle = [worker for worker in self._workers if not worker.is_running]
        for worker in idle[: min(len(self._waiting), max(0, self.free_places))]:
            worker.start()

    async def _end(self) -> None:
        self.start_idle()
        await asyncio.gather(*(worker.end() for worker in self._workers))
        await asyncio.gather(*self._scoring, return_exceptions=True)


async def _loaded_style(setup: Setup) -> Style:
    process = WorkerProcess(setup)
    try:
        return await process.load()
    finally:
        await process.close()


class _Worker:
    """One process, which is replaced when it fails, and the task that takes groups from the queue for it."""

    def __init__(self, pool: RulePool, setup: Setup, waiting: deque[Job]) -> None:
        self._pool, self._setup, self._waiting = pool, setup, waiting
        self._task: asyncio.Task[None] | None = None
        self._process: WorkerProcess | None = None
        self._style = Style.ANSWER
        self._batch_size = 1
        self.runs_long = False  # its place is free for another worker
        self.replaced = 0  # processes that were ended because of a failure

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Ends when nothing waits, or after a long program, when another worker has its place."""
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_process()

    async def _run(self) -> None:
        while self._waiting and self._pool.free_places >= 0:
            await self._score_batch()  # a call, so that no variable here keeps the last batch in memory

    def _timer(self, job: Job) -> asyncio.TimerHandle | None:
        """Of a program; none for the first, which may wait for the start of the process."""
        call, index = job
        if self._process is None or self._setup.path is not None or not runs_code(call.groups[index][0].data_source):
            return None
        return asyncio.get_running_loop().call_later(LONG_RUN_S, self._free_place)

    def _free_place(self) -> None:
        self.runs_long = True
        self._pool.start_idle()

    async def _score_batch(self) -> None:
        """At most `_batch_size` groups, and not more than a worker's share of those that wait."""
        count = min(self._batch_size, self._pool.share())
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        jobs = [job for job in taken if not job[0].result.done()]  # cancelled
        if not jobs:
            return
        start = time.monotonic()
        timer = self._timer(jobs[0])
        try:
            await self._score(jobs)
        except Exception as error:  # an error of rloom: raised where the scores are waited for
            for call, _ in jobs:
                if not call.result.done():
                    call.result.set_exception(error)
        finally:
            if timer is not None:
                timer.cancel()
            self.runs_long = False
        took_s = time.monotonic() - start
        self._batch_size = max(1, min(LARGEST_BATCH, int(len(jobs) * BATCH_S / max(took_s, 1e-6))))

    async def _score(self, jobs: Sequence[Job]) -> None:
        waiting = deque(jobs)
        try:
            reason = await self._receive_all(waiting)
            if reason is None:
                return
            exit_code = await self._end_process(grace_s=0)
        except asyncio.CancelledError:  # the pool is closed, and these were not finished
            for call, index in waiting:
                call.fail(index, CLOSED)
            await self._end_process(grace_s=0)
            raise
        self.replaced += 1
        if waiting:
            call, index = waiting.popleft()  # the worker failed at this one and had not begun the others
            group = call.groups[index]
            if exit_code == -signal.SIGVTALRM and self._setup.path is None:  # the limit that a worker sets for a rule
                call.finish(index, [wrong_score(sample.data_source, TOO_LONG) for sample in group])
            else:
                call.fail(index, reason)
            self._pool.put_back(waiting)

    async def _receive_all(self, waiting: deque[Job]) -> str | None:
        """Send the groups, and remove each from `waiting` when it has its scores. The reason, if the process failed."""
        try:
            process = await self._running_process()
            process.send(self._encode(waiting))
            while waiting:
                if len(waiting) > MANY_MISSING:
                    await process.gather_replies(GATHER_S)
                call, index = waiting[0]
                scores = await process.receive_scores(call_limit_s(self._setup, call.groups[index]))
                call.finish(index, scores)
                waiting.popleft()
        except TimeoutError:
            call, index = waiting[0]
            return _timed_out(call.groups[index], self._setup)
        except (WorkerDied, RewardError) as error:
            return str(error)
        return None

    def _encode(self, waiting: deque[Job]) -> bytes:
        """The request. A group that cannot be sent fails and is removed from `waiting`."""
        request: Request = []
        for _ in range(len(waiting)):
            call, index = waiting.popleft()
            group = call.groups[index]
            try:
                request.append((len(group), pickled(tuple(self._fields(sample) for sample in group))))
            except Exception as error:  # pickle raises errors of many types
                call.fail(index, f"this row cannot be sent to a reward worker: {type(error).__name__}: {error}")
            else:
                waiting.append((call, index))
        return encode(request)

    def _fields(self, sample: Sample) -> Fields:
        """Without what a function of this style is not given. Rules read the last turn of an episode."""
        shared = (sample.data_source, sample.prompt, sample.response, sample.ground_truth, dict(sample.extra_info))
        episode = sample.episode if self._setup.reads_episodes else None
        if self._style is Style.COLUMNS:
            return (*shared, sample.messages, (), sample.response_tokens, sample.columns, episode)
        return shared if episode is None else (*shared, (), (), (), {}, episode)

    async def _running_process(self) -> WorkerProcess:
        if self._process is None:
            self._process = WorkerProcess(self._setup)
            self._style = await self._process.load()
        return self._process

    async def _end_process(self, **grace: float) -> int | None:
        """The exit code, if there was a process."""
        if self._process is None:
            return None
        exit_code = await self._process.close(**grace)
        self._process = None  # not before: a call that is cancelled is repeated
        return exit_code


def _timed_out(group: SampleGroup, setup: Setup) -> str:
    limit_s = call_limit_s(setup, group)
    key = "reward_model.timeout_s=" if limit_s == setup.timeout_s else ""
    return (
        f"timed out after {key}{limit_s:g} s (data_source={group[0].data_source!r}, "
        f"a response of {len(group[0].response)} characters); its worker was replaced"
    )
