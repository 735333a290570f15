"""Code problems: run the program of an answer against the tests of its row, in a sandbox."""

import atexit
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from rloom.rewards.rules.code_answers import programs
from rloom.rewards.rules.code_problems import Asserts, Calls, Problem, Streams, problem_of
from rloom.rewards.sandbox.client import Isolation, Outcome, Sandbox
from rloom.rewards.sandbox.compare import same_text
from rloom.rewards.sandbox.settings import Job, Limits, Suite

REASONS_SHOWN = 3
START_AND_END_S = 30.0  # of the launcher, on a busy machine
QUICK_CPU_S = 2.0  # the first limit where a row has a reference solution
REFERENCE_FACTOR = 10.0  # an answer may take so many times the processor time of the reference
_REFERENCE_CPU_S: dict[int, float] = {}

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
class Settings:
    """`reward_model.sandbox`."""

    limits: Limits
    total_timeout_s: float
    partial_credit: bool
    isolation: Isolation

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Settings":
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
    settings = Settings.of(sandbox)
    problem = problem_of(data_source, ground_truth)
    sources = programs(solution_str, problem)
    if not sources:
        return _result(["no code in the answer"], problem.count, None, settings)
    reference = (extra_info or {}).get("answer")
    if problem.time_limit_s is not None:
        results = _Tests(problem, sources, settings, settings.limits.within(problem.time_limit_s)).results()
    elif isinstance(reference, str) and settings.limits.cpu_s > QUICK_CPU_S:
        results = _by_reference(problem, sources, settings, programs(reference, problem))
    else:
        results = _Tests(problem, sources, settings, settings.limits).results()
    return _result(results, problem.count, sources[0], settings)


def _by_reference(
    problem: Problem, sources: tuple[str, ...], settings: Settings, reference: tuple[str, ...]
) -> list[str | None]:
    """Most answers that do not end soon never end. Only an answer that needs longer makes the reference run."""
    attempt = _Tests(problem, sources, settings, settings.limits.within(QUICK_CPU_S))
    results = attempt.results()
    if not attempt.out_of_time:
        return results
    allowed_s = REFERENCE_FACTOR * _reference_cpu_s(problem, reference, settings)
    if allowed_s <= QUICK_CPU_S:
        return results
    return _Tests(problem, sources, settings, settings.limits.within(allowed_s)).results()


def _reference_cpu_s(problem: Problem, reference: tuple[str, ...], settings: Settings) -> float:
    """Of its longest run; infinite if the reference does not solve the problem. Measured once in a process."""
    key = hash((reference, repr(problem), settings))
    if key not in _REFERENCE_CPU_S:
        tests = _Tests(problem, reference, settings, settings.limits)
        solved = bool(reference) and tests.results() == [None] * problem.count
        _REFERENCE_CPU_S[key] = tests.longest_cpu_s if solved else math.inf
    return _REFERENCE_CPU_S[key]


def call_limit_s(sandbox: Mapping[str, Any]) -> float:
    """The longest time that `compute_score` takes: the last run may begin just before the total limit."""
    return float(sandbox["total_timeout_s"] + sandbox["timeout_s"] + START_AND_END_S)


@cache
def sandbox_for(limits: Limits, isolation: Isolation) -> Sandbox:
    """One for all answers that this process scores."""
    sandbox = Sandbox(limits, isolation)
    atexit.register(sandbox.close)
    return sandbox


class _Tests:
    """Runs the tests of one answer. A result is None if the test passed, else the reason. Tests after the last result
    were not run."""

    def __init__(self, problem: Problem, sources: tuple[str, ...], settings: Settings, limits: Limits) -> None:
        self._problem, self._sources, self._settings, self._limits = problem, sources, settings, limits
        self._sandbox = sandbox_for(settings.limits, settings.isolation)
        self.out_of_time = False
        self.longest_cpu_s = 0.0

    def results(self) -> list[str | None]:
        # runs after the first are new attempts after an early end, or the tests of a program that reads stdin
        one_run = not isinstance(self._problem, Streams)
        limit_s = self._limits.timeout_s if one_run else self._settings.total_timeout_s
        deadline = time.monotonic() + min(limit_s, self._settings.total_timeout_s)
        results: list[str | None] = []
        while len(results) < self._problem.count:
            if results and time.monotonic() > deadline:
                self.out_of_time = True
                return [*results, f"total time limit of {limit_s:g} s"]
            new = self._next(len(results))
            results += new
            if new[-1] is not None and not self._settings.partial_credit:
                return results
        return results

    def _next(self, first: int) -> list[str | None]:
        """The results of one run, from test `first` on: at least one."""
        if isinstance(self._problem, Streams):
            return [self._stream(self._problem, first)]
        prelude, tests = _tests(self._problem, first)
        outcome = self._run(Job(self._sources, prelude=prelude, limits=self._limits), tests)
        reported = {report["case"]: report for report in outcome.reports if "case" in report}
        results: list[str | None] = []
        while (index := first + len(results)) in reported:
            results.append(reported[index]["error"])
        if index == self._problem.count:
            return results
        reason = outcome.error or "the program ended before the test did"
        begun = any(report.get("begin") == index for report in outcome.reports)
        # an error outside of the tests fails all that are left
        return [*results, reason] if begun else [*results, *[reason] * (self._problem.count - index)]

    def _stream(self, problem: Streams, index: int) -> str | None:
        stdin, expected = problem.inputs[index], problem.outputs[index]
        job = Job(self._sources, prelude=PRELUDE, module_name="__main__", stdin=stdin, limits=self._limits)
        outcome = self._run(job, None)
        if outcome.error is not None:
            return outcome.error
        printed = outcome.run.stdout
        return None if same_text(printed, expected) else f"printed {_short(printed)}, expected {_short(expected)}"

    def _run(self, job: Job, tests: Suite | None) -> Outcome:
        outcome = self._sandbox.run(job, tests)
        self.out_of_time = self.out_of_time or outcome.run.out_of_time
        self.longest_cpu_s = max(self.longest_cpu_s, outcome.run.cpu_s)
        return outcome


def _tests(problem: Asserts | Calls, first: int) -> tuple[str, Suite]:
    """What is executed before the program, and its tests."""
    if isinstance(problem, Asserts):
        return "", Suite(first, given=problem.given, names=problem.names, source=problem.tests)
    return PRELUDE, Suite(first, function=problem.function, calls=problem.calls, outputs=problem.outputs)


def _result(
    results: list[str | None], count: int, program: str | None, settings: Settings
) -> dict[str, float | str | None]:
    passed = results.count(None)
    share, solved = passed / count, float(passed == count)
    failed = [f"test {number}: {reason}" for number, reason in enumerate(results, start=1) if reason is not None]
    reasons = failed[:REASONS_SHOWN] if program is not None else ["no code in the answer"]
    if len(failed) > REASONS_SHOWN:
        reasons.append(f"and {len(failed) - REASONS_SHOWN} more")
    return {
        "score": share if settings.partial_credit else solved,
        "acc": solved,
        "tests_passed": share,
        "pred": program,
        "detail": "; ".join([f"{passed} of {count} tests passed", *reasons]),
    }


def _short(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."
