"""Code problems: run the program of an answer against the tests of its row, in a sandbox."""

import atexit
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from rloom.rewards.rules.code_answers import programs
from rloom.rewards.rules.code_outputs import same_text, same_value
from rloom.rewards.rules.code_problems import Asserts, Calls, Problem, Streams, problem_of
from rloom.rewards.sandbox.client import Isolation, Outcome, Sandbox
from rloom.rewards.sandbox.settings import Job, Limits

REASONS_SHOWN = 3
START_AND_END_S = 30.0  # of the launcher, on a busy machine

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
    settings = Settings.of(sandbox)
    problem = problem_of(data_source, ground_truth)
    sources = programs(solution_str, problem)
    count = problem.count if isinstance(problem, Asserts) else len(problem.outputs)
    if not sources:
        return _result(["no code in the answer"], count, None, settings)
    runner = sandbox_for(settings.limits, settings.isolation)
    results = _Tests(problem, count, sources, settings, runner).results()
    return _result(results, count, sources[0], settings)


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

    def __init__(
        self, problem: Problem, count: int, sources: tuple[str, ...], settings: Settings, sandbox: Sandbox
    ) -> None:
        self._problem, self._count, self._sources = problem, count, sources
        self._settings, self._sandbox = settings, sandbox
        self._deadline = time.monotonic() + settings.total_timeout_s

    def results(self) -> list[str | None]:
        results: list[str | None] = []
        while len(results) < self._count:
            if time.monotonic() > self._deadline:
                return [*results, f"total time limit of {self._settings.total_timeout_s:g} s"]
            new = self._next(len(results))
            results += new
            if new[-1] is not None and not self._settings.partial_credit:
                return results
        return results

    def _next(self, first: int) -> list[str | None]:
        """The results of one run, from test `first` on: at least one."""
        if isinstance(self._problem, Streams):
            return [self._stream(self._problem, first)]
        outcome = self._sandbox.run(_job(self._problem, self._sources, first))
        reported = {report["case"]: report for report in outcome.reports if "case" in report}
        results: list[str | None] = []
        while (index := first + len(results)) in reported:
            results.append(_reason(self._problem, reported[index]))
        if index == self._count:
            return results
        reason = outcome.error or "the program ended before the test did"
        begun = any(report.get("begin") == index for report in outcome.reports)
        # an error outside of the tests fails all that are left
        return [*results, reason] if begun else [*results, *[reason] * (self._count - index)]

    def _stream(self, problem: Streams, index: int) -> str | None:
        job = Job(self._sources, prelude=PRELUDE, module_name="__main__", stdin=problem.inputs[index])
        outcome = self._sandbox.run(job)
        if outcome.error is not None:
            return outcome.error
        return None if same_text(outcome.run.stdout, problem.outputs[index]) else _wrong(outcome, problem, index)


def _job(problem: Asserts | Calls, sources: tuple[str, ...], first: int) -> Job:
    if isinstance(problem, Asserts):
        return Job(sources, tests=problem.tests, first_case=first)
    return Job(sources, prelude=PRELUDE, function=problem.function, calls=problem.calls, first_case=first)


def _reason(problem: Asserts | Calls, report: Mapping[str, Any]) -> str | None:
    if report["error"] is not None or isinstance(problem, Asserts):
        return report["error"]  # type: ignore[no-any-return]
    expected = problem.outputs[report["case"]]
    if same_value(report["value"], expected):
        return None
    return f"returned {_short(report['value'])}, expected {_short(expected)}"


def _wrong(outcome: Outcome, problem: Streams, index: int) -> str:
    return f"printed {_short(outcome.run.stdout)}, expected {_short(problem.outputs[index])}"


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
