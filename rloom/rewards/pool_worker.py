"""A reward worker: `python -m rloom.rewards.pool_worker`, started by the pool. See `messages.py`.

It imports no torch, so it starts in milliseconds. Output of the user's code goes to stderr, because stdout is used for
the replies.
"""

import asyncio
import faulthandler
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.custom import ARGUMENTS, GROUP_ARGUMENTS, load_function, one_line
from rloom.rewards.messages import Progress, Refusal, Reply, Setup, decode, encode, write_all
from rloom.rewards.results import to_score
from rloom.rewards.routing import Rule, call_limit_s, keywords_for, registered, rule_for
from rloom.types import Sample, SampleGroup, Score

# The pool ends a worker that exceeds its time limit. If the pool has died, the worker ends itself this much later.
ORPHAN_GRACE_S = 2.0

# If generation and rewards compete for a core, generation gets three quarters of it: the step waits for generation.
NICENESS = 5

Evaluate = Callable[[SampleGroup], list[Score]]


def main() -> None:
    os.nice(NICENESS)
    requests, replies = _claim_streams()
    receive = partial(os.read, requests)

    def reply(message: Reply) -> None:
        write_all(replies, encode(message))

    setup: Setup = decode(receive)
    try:
        with asyncio.Runner() as runner:
            evaluate = _evaluator(setup, reply, runner)
            reply(Progress.READY)
            while True:
                group: SampleGroup = decode(receive)
                _exit_after(call_limit_s(setup, group))
                scores = evaluate(group)
                faulthandler.cancel_dump_traceback_later()
                reply(scores)
    except RewardError as error:
        reply(Refusal(str(error)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the pool closed the connection, or its process was killed


def _claim_streams() -> tuple[int, int]:
    """Copies of stdin and stdout; the standard descriptors become /dev/null and stderr."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _exit_after(limit_s: float) -> None:
    # this timer runs outside the interpreter, so it also ends a regular expression that never returns
    faulthandler.dump_traceback_later(limit_s + ORPHAN_GRACE_S, exit=True, file=2)


def _evaluator(setup: Setup, reply: Callable[[Reply], None], runner: asyncio.Runner) -> Evaluate:
    if setup.path is None:
        return _RuleEvaluator(setup, reply)
    _exit_after(setup.load_limit_s)
    arguments = GROUP_ARGUMENTS if setup.whole_groups else ARGUMENTS
    function = load_function(setup.path, setup.name, setup.reward_kwargs, arguments)
    faulthandler.cancel_dump_traceback_later()
    call = _call_for_group if setup.whole_groups else _call_for_each
    return partial(call, function, dict(setup.reward_kwargs), runner)


class _RuleEvaluator:
    def __init__(self, setup: Setup, reply: Callable[[Reply], None]) -> None:
        self._setup = setup
        self._reply = reply
        self._limit_s = setup.timeout_s
        self._prepared: set[Callable[[], None]] = set()

    def __call__(self, group: SampleGroup) -> list[Score]:
        self._limit_s = call_limit_s(self._setup, group)
        return [self._score(sample) for sample in group]

    def _score(self, sample: Sample) -> Score:
        rule = rule_for(sample.data_source)
        if rule is None:
            return Score.failed(f"no reward rule for data_source={sample.data_source!r}; registered: {registered()}")
        try:
            self._prepare(rule)
        except Exception as error:  # a library that is missing or broken
            return Score.failed(f"the rule for {sample.data_source} cannot be used: {one_line(error, __file__)}")
        return _call(rule.compute_score, keywords_for(rule, self._setup), None, sample)

    def _prepare(self, rule: Rule) -> None:
        if rule.prepare in self._prepared:
            return
        self._reply(Progress.LOADING)
        _exit_after(self._setup.load_limit_s)
        rule.prepare()
        self._prepared.add(rule.prepare)
        self._reply(Progress.READY)
        _exit_after(self._limit_s)


def _call_for_each(
    function: Callable[..., Any], kwargs: dict[str, Any], runner: asyncio.Runner, group: SampleGroup
) -> list[Score]:
    return [_call(function, kwargs, runner, sample) for sample in group]


def _call(function: Callable[..., Any], kwargs: dict[str, Any], runner: asyncio.Runner | None, sample: Sample) -> Score:
    values = (sample.data_source, sample.response, sample.ground_truth, sample.extra_info)
    try:
        result = _result(function, dict(zip(ARGUMENTS, values, strict=True)) | kwargs, runner)
        return to_score(result, _describe(function))
    except BaseException as error:  # the user's code: a sys.exit() in it also fails only one sample
        return Score.failed(one_line(error, _file_of(function)))


def _call_for_group(
    function: Callable[..., Any], kwargs: dict[str, Any], runner: asyncio.Runner, group: SampleGroup
) -> list[Score]:
    """The function gets lists and returns as many results."""
    rows = [(sample.data_source, sample.response, sample.ground_truth, sample.extra_info) for sample in group]
    columns = [list(column) for column in zip(*rows, strict=True)]
    try:
        results = list(_result(function, dict(zip(GROUP_ARGUMENTS, columns, strict=True)) | kwargs, runner))
        if len(results) != len(group):
            reason = f"{_describe(function)} returned {len(results)} results for {len(group)} answers"
            return [Score.failed(reason)] * len(group)
        return [to_score(result, _describe(function)) for result in results]
    except BaseException as error:  # as above
        return [Score.failed(one_line(error, _file_of(function)))] * len(group)


def _result(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner | None) -> Any:
    result = function(**arguments)
    return runner.run(_wait_for(result)) if runner is not None and inspect.isawaitable(result) else result


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def _file_of(function: Callable[..., Any]) -> str:
    unwrapped = inspect.unwrap(function)
    return unwrapped.__code__.co_filename if inspect.isfunction(unwrapped) else ""


def _describe(function: Callable[..., Any]) -> str:
    unwrapped = inspect.unwrap(function)
    if not inspect.isfunction(unwrapped):
        return type(unwrapped).__name__
    code = unwrapped.__code__
    return f"{unwrapped.__name__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


if __name__ == "__main__":
    main()
