"""A tracker whose failures do not end the run."""

import time
from collections.abc import Callable, Mapping, Sequence

from rloom.runs.trackers.base import Cell, Tracker, first_line

PAUSE_S = 60.0  # after a failure, at least
PAUSE_FACTOR = 10.0  # of the time that the failed call took: a service out of reach may cost a minute at each call


class GuardedTracker:
    """Reports the first failure. Until a minute after one, records are left out; `metrics.jsonl` has all of them."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.tracker = name, tracker
        self._report, self._clock = report, clock
        self._next_attempt: float | None = None  # not before; None: at once
        self._lost = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self.tracker.log(step, metrics))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._attempt(lambda: self.tracker.table(step, name, columns, rows))

    def close(self, *, failed: bool = False) -> None:
        self._next_attempt = None  # one last attempt
        self._attempt(lambda: self.tracker.close(failed=failed))
        if self._lost:
            self._report(f"{self.name}: {self._lost} calls failed or were left out; metrics.jsonl has all metrics")

    def _attempt(self, call: Callable[[], None]) -> None:
        started = self._clock()
        if self._next_attempt is not None and started < self._next_attempt:
            self._lost += 1
            return
        try:
            call()
        except Exception as error:  # of a library and a service that the training does not depend on
            if not self._lost:
                self._report(f"{self.name}: {first_line(error)}; the run goes on, and tries again later")
            failed = self._clock()
            self._next_attempt = failed + max(PAUSE_S, PAUSE_FACTOR * (failed - started))
            self._lost += 1
