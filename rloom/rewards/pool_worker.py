"""A reward worker: a process that the pool starts. See `base.py`.

It imports no torch, so it starts in milliseconds. Output of the user's code goes to stderr, because stdout is used for
the replies.
"""

import asyncio
import faulthandler
import math
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rloom.errors import RewardError
from rloom.interrupts import outlive_sigterm
from rloom.rewards.base import Fields, LoadProgress, Refusal, Reply, Request, Setup, Style, decode, encode
from rloom.rewards.framing import write_all
from rloom.rewards.routing import Rule, call_limit_s, keywords_for, registered, rule_for, runs_code
from rloom.rewards.rules.limited import HARD_LIMIT_S
from rloom.rewards.user_function import FunctionCaller, load_function, one_line
from rloom.types import Sample, SampleGroup, Score

# The pool ends a worker that exceeds its time limit. If the pool has died, the worker ends itself this much later.
ORPHAN_GRACE_S = 2.0
RESTART_S = 0.5  # starting the timer costs as much as a cheap rule, so it is restarted at most this often

# Address space of a worker for rules: an answer that needs more raises MemoryError, before the kernel ends a process.
RULE_MEMORY = 8 << 30

# If generation and rewards compete for a core, generation gets three quarters of it: the step waits for generation.
NICENESS = 5

Evaluate = Callable[[SampleGroup], list[Score]]


def main() -> None:
    os.nice(NICENESS)
    outlive_sigterm()  # the pool ends this process through its socket
    requests, replies = _claim_streams()
    receive = partial(os.read, requests)

    def reply(message: Reply) -> None:
        write_all(replies, encode(message))

    setup: Setup = decode(receive)
    timer = _ExitTimer()
    try:
        with asyncio.Runner() as runner:
            style, evaluate = _evaluator(setup, reply, runner, timer)
            reply(style)

            def score_group(samples: int, body: bytes) -> None:
                """A call, so that no variable keeps the samples in memory."""
                try:
                    rows: tuple[Fields, ...] = pickle.loads(body)
                except Exception as error:  # the classes of a row may raise errors of any type
                    reason = f"this row cannot be read by a reward worker: {type(error).__name__}: {error}"
                    reply([Score.failed(reason)] * samples)
                    return
                group = tuple(Sample(*fields) for fields in rows)
                timer.start(call_limit_s(setup, group))
                reply(evaluate(group))

            while True:
                request: Request = decode(receive)
                for samples, body in request:
                    score_group(samples, body)
                timer.cancel()
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


class _ExitTimer:
    """Ends this process after a time limit and ORPHAN_GRACE_S. It runs outside the interpreter, so it also ends a
    regular expression that never returns."""

    def __init__(self) -> None:
        self._limit_s, self._started_s = 0.0, 0.0

    def start(self, limit_s: float) -> None:
        now_s = time.monotonic()
        if limit_s == self._limit_s and now_s - self._started_s < RESTART_S:
            return
        self._limit_s, self._started_s = limit_s, now_s
        faulthandler.dump_traceback_later(limit_s + ORPHAN_GRACE_S, exit=True, file=2)

    def cancel(self) -> None:
        self._limit_s = 0.0
        faulthandler.cancel_dump_traceback_later()


def _evaluator(
    setup: Setup, reply: Callable[[Reply], None], runner: asyncio.Runner, timer: _ExitTimer
) -> tuple[Style, Evaluate]:
    if setup.path is None:
        with suppress(ValueError, OSError):  # a lower limit is set, or the system has none
            resource.setrlimit(resource.RLIMIT_AS, (RULE_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        return Style.ANSWER, _RuleEvaluator(setup, reply, timer)
    timer.start(setup.load_limit_s)
    function, style = load_function(setup.path, setup.name, setup.reward_kwargs, whole_groups=setup.whole_groups)
    timer.cancel()
    return style, FunctionCaller(function, setup.reward_kwargs, runner).for_group(style)


class _RuleEvaluator:
    def __init__(self, setup: Setup, reply: Callable[[Reply], None], timer: _ExitTimer) -> None:
        self._setup = setup
        self._reply = reply
        self._timer = timer
        self._callers: dict[str, FunctionCaller] = {}  # by data source
        self._limit_s = setup.timeout_s
        self._prepared: set[Callable[[], None]] = set()
        self._hard_limit_set = -math.inf  # when

    def __call__(self, group: SampleGroup) -> list[Score]:
        self._limit_s = call_limit_s(self._setup, group)
        return [self._score(sample) for sample in group]

    def _score(self, sample: Sample) -> Score:
        source = sample.data_source
        if source not in self._callers:
            rule = rule_for(source)
            if rule is None:
                return Score.failed(f"no reward rule for data_source={source!r}; registered: {registered()}")
            try:
                self._prepare(rule)
            except Exception as error:  # a library that is missing or broken
                return Score.failed(f"the rule for {source} cannot be used: {one_line(error, __file__)}")
            self._callers[source] = FunctionCaller(rule.compute_score, keywords_for(rule, self._setup))
        if runs_code(source):
            return self._callers[source].for_answer(sample)
        # SIGVTALRM ends this process, also in code that runs no Python. The pool then knows that the answer caused it.
        # The timer stands still while the process waits for answers.
        if time.monotonic() - self._hard_limit_set > RESTART_S:
            signal.setitimer(signal.ITIMER_VIRTUAL, HARD_LIMIT_S)
            self._hard_limit_set = time.monotonic()
        return self._callers[source].for_answer(sample)

    def _prepare(self, rule: Rule) -> None:
        if rule.prepare in self._prepared:
            return
        self._reply(LoadProgress.LOADING)
        self._timer.start(self._setup.load_limit_s)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # an import is not the answer's time
        self._hard_limit_set = -math.inf
        rule.prepare()
        self._prepared.add(rule.prepare)
        self._reply(LoadProgress.READY)
        self._timer.start(self._limit_s)
