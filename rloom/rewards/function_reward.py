"""A function of the calling program as the reward: it is called in threads of this process."""

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from rloom.errors import RewardError
from rloom.rewards.base import ScoringUnit, Style
from rloom.rewards.user_function import FunctionCaller, checked_style
from rloom.types import SampleGroup, Score

EXIT_GRACE_S = 2.0  # for a call that still runs when the reward is closed
SIGNATURES = """
  reward(data_source, solution_str, ground_truth, extra_info): for each answer; returns a number or a dict with 'score'
  reward(prompts, completions, **columns): as in TRL, with lists, for all answers to a prompt; returns a list"""


class FunctionReward:
    """A Reward that calls `function`, at most `concurrent_calls` at a time.

    A thread cannot be killed. A call that takes longer than `timeout_s` fails, and SystemExit is raised in its thread,
    which ends Python code at its next instruction. A call that waits in C code ends when it returns. Another thread
    takes over, so other answers are not affected.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        concurrent_calls: int,
        timeout_s: float,
        reward_kwargs: Mapping[str, Any],
        whole_groups: bool,
    ) -> None:
        self._function, self._kwargs, self._timeout_s = function, reward_kwargs, timeout_s
        self._style = style_of(function, reward_kwargs, whole_groups=whole_groups)
        self._replaced = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [self._new_thread() for _ in range(concurrent_calls)]

    @property
    def unit(self) -> ScoringUnit:
        return ScoringUnit.ANSWER if self._style is Style.ANSWER else ScoringUnit.PROMPT

    def check(self) -> None:
        """The constructor has checked the signature."""

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score_group, groups)))

    def metrics(self) -> dict[str, float]:
        """Of the calls since the last `metrics()`."""
        replaced, self._replaced = self._replaced, 0
        return {"workers_replaced": float(replaced)}

    def close(self) -> None:
        for thread in self._threads:
            thread.ending = True
        for _ in self._threads:
            self._jobs.put(None)  # for those that wait
        for thread in self._threads:
            thread.join(EXIT_GRACE_S)
            if thread.is_alive():
                thread.interrupt()

    async def _score_group(self, group: SampleGroup) -> list[Score]:
        loop = asyncio.get_running_loop()
        job = _Job(group, loop, loop.create_future(), loop.create_future())
        self._jobs.put(job)
        thread = await job.begun  # the time limit is that of the call alone
        try:
            return await asyncio.wait_for(job.scores, self._timeout_s)
        except TimeoutError:
            self._replace(thread)
            reason = (
                f"timed out after reward_model.timeout_s={self._timeout_s:g} s "
                f"(data_source={group[0].data_source!r}, a response of {len(group[0].response)} characters)"
            )
            return [Score.failed(reason)] * len(group)

    def _replace(self, thread: "_CallThread") -> None:
        thread.ending = True
        thread.interrupt()
        self._threads[self._threads.index(thread)] = self._new_thread()
        self._replaced += 1

    def _new_thread(self) -> "_CallThread":
        thread = _CallThread(self._jobs, self._function, self._kwargs, self._style)
        thread.start()
        return thread


def style_of(function: Callable[..., Any], reward_kwargs: Mapping[str, Any], *, whole_groups: bool) -> Style:
    if not callable(function):
        raise RewardError(f"reward is {type(function).__name__}; it must be a function:{SIGNATURES}")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return checked_style(function, f"reward={name}", "", reward_kwargs, whole_groups=whole_groups)
    except RewardError as error:
        raise RewardError(f"{error}. Use one of these signatures:{SIGNATURES}") from error


class _Job(NamedTuple):
    group: SampleGroup
    loop: asyncio.AbstractEventLoop  # of the futures
    begun: "asyncio.Future[_CallThread]"
    scores: "asyncio.Future[list[Score]]"

    def set(self, future: "asyncio.Future[Any]", value: Any) -> None:
        """From another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the result
            self.loop.call_soon_threadsafe(_set_result, future, value)


def _set_result(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():  # it may have timed out, or been cancelled
        future.set_result(value)


class _CallThread(threading.Thread):
    """Calls the function for one group after another. A daemon, so that a call that never returns ends with the
    process."""

    def __init__(
        self,
        jobs: "SimpleQueue[_Job | None]",
        function: Callable[..., Any],
        kwargs: Mapping[str, Any],
        style: Style,
    ) -> None:
        super().__init__(name="reward-function", daemon=True)
        self._jobs, self._function, self._kwargs, self._style = jobs, function, kwargs, style
        self.ending = False  # set by another thread: no further calls

    def interrupt(self) -> None:
        """From another thread: raise SystemExit in the current call."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit))

    def run(self) -> None:
        with asyncio.Runner() as runner:  # for async functions
            evaluate = FunctionCaller(self._function, self._kwargs, runner).for_group(self._style)
            while not self.ending and (job := self._jobs.get()) is not None and not self.ending:
                job.set(job.begun, self)
                # a function that changes its extra_info must not change the row
                group = tuple(replace(sample, extra_info=dict(sample.extra_info)) for sample in job.group)
                job.set(job.scores, evaluate(group))
