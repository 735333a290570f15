"""Code problems: run the program of an answer against the tests of its row, in a sandbox."""

import atexit
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from rloom.rewards.rules.code_answers import programs
from rloom.rewards.rules.code_problems import Asserts, Calls, Problem, Streams, problem_of
from rloom.rewards.sandbox.client import Isolation, Sandbox, SandboxOutcome
from rloom.rewards.sandbox.settings import Limits, SandboxJob, Suite
from rloom.rewards.sandbox.tests import same_text, short

REASONS_SHOWN = 3
NO_CODE = "no code in the answer"
START_AND_END_S = 30.0  # of the launcher, on a busy machine
QUICK_CPU_S = 1.0  # the first limit where a row has a reference solution
REFERENCE_FACTOR = 10.0  # an answer may take so many times the processor time of the reference
AFTER_LIMIT = 0.25  # share of the time limit for the tests after one that ran into it
SLOW_DISK_S = 2.0  # a limit in which importing a library from a slow disk may not end
_REFERENCE_CPU_S: dict[int, float | None] = {}

# Solutions of competition problems are published without their imports.
PRELUDE = """
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator, os, random, re
import statistics, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from functools import cache, cmp_to_key, lru_cache, partial, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, merge, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, islice, permutations, product, repeat
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, log, log2, pi, sqrt
from typing import *
"""


@dataclass(frozen=True)
class CodeSettings:
    """`reward_model.sandbox`."""

    limits: Limits
    total_timeout_s: float
    partial_credit: bool
    isolation: Isolation

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "CodeSettings":
        limits = Limits(**{field.name: values[field.name] for field in fields(Limits)})
        return cls(limits, values["total_timeout_s"], values["partial_credit"], values["isolation"])


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    sandbox: Mapping[str, Any],
) -> dict[str, float | str | None]:
    """`extra_info["answer"]`: a reference solution, by whose processor time an answer is limited."""
    settings = CodeSettings.of(sandbox)
    problem = problem_of(data_source, ground_truth)
    sources = programs(solution_str, problem)
    if not sources:
        return _result([], problem.count, None, settings, out_of_time=False)
    answer = _Answer(problem, sources, settings, time.monotonic() + settings.total_timeout_s)
    reference = (extra_info or {}).get("answer", problem.reference)
    if problem.time_limit_s is not None:
        results = answer.results(settings.limits.within(problem.time_limit_s))
    elif isinstance(reference, str) and settings.limits.cpu_s > QUICK_CPU_S:
        results = _by_reference(answer, programs(reference, problem))
    else:
        results = answer.results(settings.limits)
    return _result(results, problem.count, sources[0], settings, out_of_time=answer.out_of_time)


def call_limit_s(sandbox: Mapping[str, Any]) -> float:
    """The longest time that `compute_score` takes, for an answer and its reference: the last run of each may begin just
    before the total limit."""
    return float(2 * (sandbox["total_timeout_s"] + sandbox["timeout_s"]) + START_AND_END_S)


def _by_reference(answer: "_Answer", reference: tuple[str, ...]) -> list[str | None]:
    """Most answers that do not end soon never end. Only an answer that needs longer makes the reference run."""
    limits = answer.settings.limits
    results = answer.results(limits.within(QUICK_CPU_S))
    if not answer.out_of_time:
        return results
    begun = time.monotonic()
    reference_s = _reference_cpu_s(answer, reference)
    answer.deadline += time.monotonic() - begun  # the reference has a total limit of its own
    allowed = limits if reference_s is None else limits.within(REFERENCE_FACTOR * reference_s)
    return results if allowed.cpu_s <= QUICK_CPU_S or answer.is_late else answer.results(allowed)


def _reference_cpu_s(answer: "_Answer", reference: tuple[str, ...]) -> float | None:
    """Processor time of the longest run of the reference, measured once in a process; None if it does not solve the
    problem."""
    problem, settings = answer.problem, answer.settings
    key = hash((reference, repr(problem), settings))
    if key not in _REFERENCE_CPU_S:
        timed = _Answer(problem, reference, settings, time.monotonic() + settings.total_timeout_s)
        solved = bool(reference) and timed.results(settings.limits) == [None] * problem.count
        _REFERENCE_CPU_S[key] = timed.longest_cpu_s if solved else None
    return _REFERENCE_CPU_S[key]


@cache
def sandbox_for(limits: Limits, isolation: Isolation) -> Sandbox:
    """One for all answers that this process scores."""
    sandbox = Sandbox(limits, isolation)
    atexit.register(sandbox.close)
    return sandbox


class _Answer:
    """Runs the tests of one answer until `deadline`. A result is None if the test passed, else the reason. Tests after
    the last result were not run."""

    def __init__(self, problem: Problem, sources: tuple[str, ...], settings: CodeSettings, deadline: float) -> None:
        self.problem, self._sources, self.settings, self.deadline = problem, sources, settings, deadline
        self._sandbox = sandbox_for(settings.limits, settings.isolation)
        self.out_of_time = self._repeated = False
        self.longest_cpu_s = 0.0

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def results(self, limits: Limits) -> list[str | None]:
        self._limits, self.out_of_time = limits, False
        results: list[str | None] = []
        while len(results) < self.problem.count:
            if results and self.is_late:
                self.out_of_time = True
                return [*results, f"total time limit of {self.settings.total_timeout_s:g} s"]
            second = self.out_of_time
            results += self._next(len(results))
            if results[-1] is not None and not self.settings.partial_credit:
                return results
            if self.out_of_time and not isinstance(self.problem, Streams):  # their limit is for all tests together
                if second:
                    return results
                self._limits = limits.within(AFTER_LIMIT * limits.cpu_s)
        return results

    def _next(self, first: int) -> list[str | None]:
        """The results of one run, from test `first` on: at least one."""
        if isinstance(self.problem, Streams):
            return [self._stream(self.problem, first)]
        prelude, tests = _tests(self.problem, first, go_on=self.settings.partial_credit)
        outcome = self._run(SandboxJob(self._sources, prelude=prelude, limits=self._limits), tests)
        reported = {report["case"]: report for report in outcome.reports if "case" in report}
        results: list[str | None] = []
        while (index := first + len(results)) in reported:
            results.append(reported[index]["error"])
        if index == self.problem.count or (results and results[-1] is not None and not self.settings.partial_credit):
            return results
        reason = outcome.error or "the program ended before the test did"
        begun = any(report.get("begin") == index for report in outcome.reports)
        # an error outside of the tests fails all that are left
        return [*results, reason] if begun else [*results, *[reason] * (self.problem.count - index)]

    def _stream(self, problem: Streams, index: int) -> str | None:
        stdin, expected = problem.inputs[index], problem.outputs[index]
        job = SandboxJob(self._sources, prelude=PRELUDE, module_name="__main__", stdin=stdin, limits=self._limits)
        outcome = self._run(job, None)
        if outcome.error is not None:
            return outcome.error
        printed = outcome.run.stdout
        return None if same_text(printed, expected) else f"printed {short(printed)}, expected {short(expected)}"

    def _run(self, job: SandboxJob, tests: Suite | None) -> SandboxOutcome:
        outcome = self._sandbox.run(job, tests)
        run, limits = outcome.run, self._limits
        slept = run.out_of_time and run.cpu_s < limits.cpu_s / 2 and run.wall_s < limits.timeout_s
        if slept and limits.cpu_s <= SLOW_DISK_S and not self._repeated and not self.is_late:
            self._repeated = True  # once: what it read is now in memory
            outcome = self._sandbox.run(job, tests)
        self.out_of_time = self.out_of_time or outcome.run.out_of_time
        self.longest_cpu_s = max(self.longest_cpu_s, outcome.run.cpu_s)
        return outcome


def _tests(problem: Asserts | Calls, first: int, *, go_on: bool) -> tuple[str, Suite]:
    """What is executed before the program, and its tests."""
    if isinstance(problem, Asserts):
        return "", Suite(first, go_on, given=problem.given, names=problem.names, source=problem.tests)
    return PRELUDE, Suite(first, go_on, function=problem.function, calls=problem.calls, outputs=problem.outputs)


def _result(
    results: list[str | None], count: int, program: str | None, settings: CodeSettings, *, out_of_time: bool
) -> dict[str, float | str | None]:
    passed = results.count(None)
    share, solved = passed / count, float(passed == count)
    failed = [f"test {number}: {reason}" for number, reason in enumerate(results, start=1) if reason is not None]
    reasons = failed[:REASONS_SHOWN] if program is not None else [NO_CODE]
    if len(failed) > REASONS_SHOWN:
        reasons.append(f"and {len(failed) - REASONS_SHOWN} more")
    return {
        "score": share if settings.partial_credit else solved,
        "acc": solved,
        "tests_passed": share,
        "out_of_time": float(out_of_time),
        "pred": program,
        "detail": "; ".join([f"{passed} of {count} tests passed", *reasons]),
    }
