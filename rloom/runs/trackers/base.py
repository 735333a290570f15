"""What a tracker is, what it is started with, and the parts that several of them use."""

import importlib
import json
import re
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

from rloom.atomic import replace_text
from rloom.errors import ConfigError
from rloom.extras import install_command
from rloom.runs.records import METRICS_FILE, append_metrics, truncate_metrics

Cell = str | float | int | bool | None

MAX_MESSAGE = 240  # characters of a library's error
RUN_IDS_FILE = "tracker_runs.json"


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """May be called more than once per step, with other names."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None: ...

    def close(self, *, failed: bool = False) -> None:
        """`failed`: the run did not end as planned."""


@dataclass(frozen=True)
class Start:
    """What a tracker is started with."""

    run_dir: Path
    project: str
    experiment: str
    config: Mapping[str, Any]  # nested
    resumed: bool = False  # continues from a checkpoint: the curves go on
    report: Callable[[str], None] = print

    def run_id(self, tracker: str) -> str | None:
        """The id of this run in the tracker's service, if the start continues it."""
        return _run_ids(self.run_dir).get(tracker) if self.resumed else None

    def keep_run_id(self, tracker: str, run_id: str) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        replace_text(self.run_dir / RUN_IDS_FILE, json.dumps({**_run_ids(self.run_dir), tracker: run_id}))


def import_library(module: str, *, logger: str, install: str | None = None) -> Any:
    """`install`: the command, where the library is not an extra of the logger's name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger={logger!r} is not installed ({error}); remove it from trainer.logger, or install it: "
            f"{install or install_command(logger)}"
        ) from error


@contextmanager
def silent() -> Iterator[None]:
    """Without the library's lines on the terminal, which would break the progress bars, and without its warnings."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    line = without_login(str(error).strip().partition("\n")[0])
    return textwrap.shorten(line, MAX_MESSAGE, placeholder=" ...") or type(error).__name__


def without_login(text: str) -> str:
    """Addresses without a user and a password: `https://me:secret@host` -> `https://host`."""
    return re.sub(r"://[^/@\s]+@", "://", text)


def cell(value: Any) -> Cell:
    return value if value is None or isinstance(value, Cell) else json.dumps(value, ensure_ascii=False, default=str)


def _run_ids(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / RUN_IDS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


PAUSE_S = 60.0  # after a failure, at least
PAUSE_FACTOR = 10.0  # times the failed call's duration: a service out of reach may cost a minute at each call


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
        except Exception as error:  # in a library or a service that the training does not depend on
            if not self._lost:
                self._report(f"{self.name}: {first_line(error)}; the run goes on, and tries again later")
            failed = self._clock()
            self._next_attempt = failed + max(PAUSE_S, PAUSE_FACTOR * (failed - started))
            self._lost += 1


class FileTracker:
    """One JSON object per line, on disk when `log` returns."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = run_dir / METRICS_FILE
        truncate_metrics(self._file)  # removes a line that a crash left incomplete

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_metrics(self._file, step, metrics)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        pass  # answers are dumped by `trainer.log_rollouts` and `trainer.validation_data_dir`

    def close(self, *, failed: bool = False) -> None:
        pass  # `log` opens and closes the file
