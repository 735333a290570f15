"""A tracker whose failures do not end the run."""

import time
from collections.abc import Callable, Mapping, Sequence

from rloom.observe.trackers.base import Cell, Tracker, first_line

PAUSE_S = 60.0  # after a failure: a service out of reach may cost seconds at each call


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
        self._failed_at: float | None = None
        self._lost = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(lambda: self.tracker.log(step, metrics))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self._attempt(lambda: self.tracker.table(step, name, columns, rows))

    def close(self, *, failed: bool = False) -> None:
        self._failed_at = None  # one last attempt
        self._attempt(lambda: self.tracker.close(failed=failed))
        if self._lost:
            self._report(f"{self.name}: {self._lost} calls failed or were left out; metrics.jsonl has all metrics")

    def _attempt(self, call: Callable[[], None]) -> None:
        if self._failed_at is not None and self._clock() < self._failed_at + PAUSE_S:
            self._lost += 1
            return
        try:
            call()
        except Exception as error:  # of a library and a service that the training does not depend on
            if not self._lost:
                self._report(
                    f"{self.name}: {first_line(error)}; the run goes on, and tries again every {PAUSE_S:.0f} s"
                )
            self._failed_at = self._clock()
            self._lost += 1
