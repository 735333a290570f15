"""Rules and users' functions, run in processes of their own."""

import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.base import Unit
from rloom.rewards.jobs import Call, Job, JobQueue
from rloom.rewards.messages import Setup, Style, encode, pickled
from rloom.rewards.process import WorkerDied, WorkerProcess
from rloom.rewards.routing import call_limit_s, wrong_score
from rloom.rewards.rules.limited import HARD_LIMIT_S
from rloom.types import Sample, SampleGroup, Score

LOAD_LIMIT_S = 120.0  # a user's file may import torch from a slow disk

# Cheap calls are sent in batches, of about this duration and at most this size: a round trip takes longer than a rule.
# Slow calls are sent one by one, to the worker that is free first.
BATCH_S = 0.05
LARGEST_BATCH = 64

TOO_LONG = f"the answer was not compared: evaluating it took over {HARD_LIMIT_S:g} s"
CLOSED = "the reward was closed before this sample was scored"


class RulePool:
    """A Reward over `num_workers` processes: by the rules, or by the function `name` of the file `path`.

    Each process has a thread here that sends it samples, so the pool works with any event loop and closes without one.
    A call that takes longer than `timeout_s` fails, and its process is replaced; other samples are not affected. An
    answer that a rule cannot evaluate in its own limit of CPU time is wrong.
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
        self._style = Style.ANSWER if path is None else None
        self._jobs = JobQueue(num_workers)
        self._workers = [_Worker(self._setup, self._jobs) for _ in range(num_workers)]
        self._lock = threading.Lock()
        self._started = False
        self._closed = False

    @property
    def unit(self) -> Unit:
        """The signature of a user's function decides it, so the first use loads the file."""
        self.check()
        return Unit.ANSWER if self._style in (Style.ANSWER, Style.QUERIES) else Unit.PROMPT

    def check(self) -> None:
        """Load the user's file in a worker, as scoring will. The RewardError names what is wrong with it."""
        if self._style is not None:
            return
        process = WorkerProcess(self._setup)
        try:
            self._style = process.load()
        finally:
            process.close()

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        self._start()
        if not groups:
            return []
        call = Call(len(groups))
        self._jobs.put([Job(call, index, group) for index, group in enumerate(groups)])
        return await call.result

    def metrics(self) -> dict[str, float]:
        """Of the calls since the last `metrics()`."""
        return {"workers_replaced": float(sum(worker.take_replaced() for worker in self._workers))}

    def close(self) -> None:
        """End all workers. What is still waiting becomes a failed score."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.stop()
        self._jobs.close()
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


class _Worker(threading.Thread):
    """A thread that takes samples from the queue, and its process, which is replaced when it fails.

    A daemon, so that a run that dies without closing the pool is not kept alive by it.
    """

    def __init__(self, setup: Setup, jobs: JobQueue) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self._setup = setup
        self._jobs = jobs
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._style = Style.ANSWER
        self._batch_size = 1
        self._replaced = 0
        self._stopping = False

    def run(self) -> None:
        while self._score_batch():  # a call, so that no variable here keeps the last batch in memory
            pass
        self._end_process(grace=True)

    def stop(self) -> None:
        """From another thread: interrupt the current call; what waits fails."""
        with self._lock:
            self._stopping = True
            if self._process is not None:
                self._process.interrupt()

    def take_replaced(self) -> int:
        """From another thread: how many processes were ended since the last call, because of a failure."""
        with self._lock:
            replaced, self._replaced = self._replaced, 0
        return replaced

    def _score_batch(self) -> bool:
        """False when the queue is closed and empty."""
        taken = self._jobs.take(self._batch_size)
        jobs = [job for job in taken if not job.call.result.cancelled()]
        if not jobs:
            return bool(taken)
        start = time.monotonic()
        try:
            self._score(jobs)
        except BaseException as error:  # an error of rloom: raised where the scores are waited for
            for job in jobs:
                job.call.set_exception(error)
        took_s = time.monotonic() - start
        self._batch_size = max(1, min(LARGEST_BATCH, int(len(jobs) * BATCH_S / max(took_s, 1e-6))))
        return True

    def _score(self, jobs: Sequence[Job]) -> None:
        waiting = deque(jobs)
        try:
            process = self._running_process()
            request, waiting = self._encode(jobs)
            process.send(request)
            while waiting:
                scores = process.receive_scores(call_limit_s(self._setup, waiting[0].group))
                waiting.popleft().finish(scores)
            return
        except TimeoutError:
            reason = _timed_out(waiting[0].group, self._setup) if waiting else ""
        except (WorkerDied, RewardError) as error:
            reason = str(error)
        exit_code = self._end_process(grace=False)
        if self._stopping:
            for job in waiting:
                job.fail(CLOSED)
        elif waiting:
            job = waiting.popleft()  # the worker failed at this one and had not begun the others
            if exit_code == -signal.SIGVTALRM and self._setup.path is None:  # the limit that a worker sets for a rule
                job.finish([wrong_score(sample.data_source, TOO_LONG) for sample in job.group])
            else:
                job.fail(reason)
            self._jobs.put_back(waiting)

    def _encode(self, jobs: Sequence[Job]) -> "tuple[bytes, deque[Job]]":
        """The request and the jobs in it. A job that cannot be sent fails."""
        bodies, sent = [], deque[Job]()
        for job in jobs:
            try:
                bodies.append(pickled(tuple(_as_sent(sample, self._style) for sample in job.group)))
                sent.append(job)
            except Exception as error:  # pickle raises errors of many types
                job.fail(f"this row cannot be sent to a reward worker: {type(error).__name__}: {error}")
        return encode(tuple(bodies)), sent

    def _running_process(self) -> WorkerProcess:
        with self._lock:
            if self._stopping:
                raise WorkerDied
            if self._process is not None:
                return self._process
            self._process = process = WorkerProcess(self._setup)
        self._style = process.load()
        return process

    def _end_process(self, *, grace: bool) -> int | None:
        """The exit code, if there was a process."""
        with self._lock:
            process, self._process = self._process, None
            self._replaced += not grace
        if process is None:
            return None
        return process.close() if grace else process.close(grace_s=0)


def _timed_out(group: SampleGroup, setup: Setup) -> str:
    limit_s = call_limit_s(setup, group)
    key = "reward_model.timeout_s=" if limit_s == setup.timeout_s else ""
    return (
        f"timed out after {key}{limit_s:g} s (data_source={group[0].data_source!r}, "
        f"a response of {len(group[0].response)} characters); its worker was replaced"
    )


def _as_sent(sample: Sample, style: Style) -> Sample:
    """Without what a function of this style is not given."""
    if style is Style.COLUMNS:
        return replace(sample, prompt_tokens=())
    return replace(
        sample, extra_info=dict(sample.extra_info), messages=(), prompt_tokens=(), response_tokens=(), columns={}
    )
