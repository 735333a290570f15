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
from rloom.rewards.base import Unit
from rloom.rewards.calls import FunctionCaller
from rloom.rewards.custom import checked_style
from rloom.rewards.messages import Style
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
        self._threads = [self._new_thread() for _ in range(concurrent_calls)]
        self._free: asyncio.Queue[_CallThread] = asyncio.Queue()
        for thread in self._threads:
            self._free.put_nowait(thread)

    @property
    def unit(self) -> Unit:
        return Unit.ANSWER if self._style is Style.ANSWER else Unit.PROMPT

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
            thread.stop()
        for thread in self._threads:
            thread.join(EXIT_GRACE_S)
            if thread.is_alive():
                thread.interrupt()

    async def _score_group(self, group: SampleGroup) -> list[Score]:
        thread = await self._free.get()
        try:
            return await asyncio.wait_for(thread.call(group), self._timeout_s)
        except TimeoutError:
            self._threads.remove(thread)
            thread.stop()
            thread.interrupt()
            thread = self._new_thread()
            self._threads.append(thread)
            self._replaced += 1
            reason = (
                f"timed out after reward_model.timeout_s={self._timeout_s:g} s "
                f"(data_source={group[0].data_source!r}, a response of {len(group[0].response)} characters)"
            )
            return [Score.failed(reason)] * len(group)
        finally:
            self._free.put_nowait(thread)

    def _new_thread(self) -> "_CallThread":
        thread = _CallThread(self._function, self._kwargs, self._style)
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
    loop: asyncio.AbstractEventLoop
    result: "asyncio.Future[list[Score]]"


class _CallThread(threading.Thread):
    """Calls the function for one group after another. A daemon, so that a call that never returns ends with the
    process."""

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any], style: Style) -> None:
        super().__init__(name="reward-function", daemon=True)
        self._function, self._kwargs, self._style = function, kwargs, style
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()

    def call(self, group: SampleGroup) -> "asyncio.Future[list[Score]]":
        """From an event loop, which the result belongs to."""
        loop = asyncio.get_running_loop()
        job = _Job(group, loop, loop.create_future())
        self._jobs.put(job)
        return job.result

    def stop(self) -> None:
        """From another thread: end after the current call."""
        self._jobs.put(None)

    def interrupt(self) -> None:
        """From another thread: raise SystemExit in the current call."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(SystemExit))

    def run(self) -> None:
        with asyncio.Runner() as runner:  # for async functions
            evaluate = FunctionCaller(self._function, self._kwargs, runner).for_group(self._style)
            while (job := self._jobs.get()) is not None:
                # a function that changes its extra_info must not change the row
                group = tuple(replace(sample, extra_info=dict(sample.extra_info)) for sample in job.group)
                scores = evaluate(group)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the result
                    job.loop.call_soon_threadsafe(_set_result, job.result, scores)


def _set_result(result: "asyncio.Future[list[Score]]", scores: list[Score]) -> None:
    if not result.done():  # it may have timed out
        result.set_result(scores)
