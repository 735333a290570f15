"""The runs that are shown. Each is read as far as it is written, whenever a request asks for it."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from rloom.doctor.run.report import Report
from rloom.errors import DataError
from rloom.runs.records import EVENTS_FILE, METRICS_FILE
from rloom.runs.run_folder import CONFIG_FILE, RunFolder, RunSummary, is_run, run_directories, summarize
from rloom.view.http_errors import NotFound

if TYPE_CHECKING:
    from rloom.runs.dumps.reader import Dumps


WRITTEN = (EVENTS_FILE, METRICS_FILE, CONFIG_FILE)  # files whose change invalidates a summary


def preload() -> None:
    """Import what the first request for a dump needs, while the browser opens."""
    Thread(target=import_module, args=("rloom.runs.dumps.reader",), name="preload", daemon=True).start()


Defaults = Callable[[str], Mapping[str, Any]]  # "rl" or "sft" -> the default of every key


def no_defaults(kind: str) -> Mapping[str, Any]:
    return {}


class RunHandle:
    """A run's files are read one request after another, and at first when a request needs them."""

    def __init__(self, number: int, path: Path, defaults: Defaults) -> None:
        self.number, self.path, self.defaults = number, path, defaults
        self._lock = Lock()
        self._folder: RunFolder | None = None
        self._dumps: Dumps | None = None
        self._summary: RunSummary | None = None
        self._summarised: list[tuple[int, int]] = []  # state of the files when `_summary` was made
        self._report: Report | None = None
        self._reported: list[tuple[int, int]] = []  # the same for `_report`
        self._next_report = 0.0
        self._opened_ms = int(time.time() * 1000)

    @contextmanager
    def _lock_run(self) -> Iterator[None]:
        with self._lock:
            if not is_run(self.path):
                raise NotFound(f"{self.path} is no run directory any more")
            yield

    @contextmanager
    def folder(self) -> Iterator[RunFolder]:
        """Up to date, and not read by another thread meanwhile."""
        with self._lock_run():
            if self._folder is None:
                self._folder = RunFolder(self.path)
            else:
                self._folder.refresh()
            yield self._folder

    @contextmanager
    def dumps(self) -> "Iterator[Dumps]":
        from rloom.runs.dumps.reader import Dumps  # pyarrow: half of the time that the command would need to start

        with self._lock:
            if self._dumps is None:
                self._dumps = Dumps(self.path)
            else:
                self._dumps.refresh()
            yield self._dumps

    def summary(self) -> RunSummary:
        """In one line. Without reading all of the run: a list may have hundreds."""
        with self._lock_run():
            written = [_status(self.path / name) for name in WRITTEN]
            # whether a process still runs is seen in no file
            if self._summary is None or written != self._summarised or not self._summary.state.status.is_final:
                self._summary, self._summarised = summarize(self.path), written
            return self._summary

    @property
    def has_report(self) -> bool:
        return self._report is not None

    def report(self) -> Report:
        """Its findings, as new as the files; of a run that writes, 5 % of the time are spent on it."""
        with self._lock_run():
            written = [_status(self.path / name) for name in WRITTEN]
            started = time.monotonic()
            if self._report is None or (written != self._reported and started >= self._next_report):
                # a run that no page has opened is not kept in memory: a list may have hundreds
                folder = RunFolder(self.path) if self._folder is None else self._folder
                folder.refresh()
                self._report, self._reported = Report.of(folder), written
                ended = time.monotonic()
                self._next_report = ended + 20 * (ended - started)
            return self._report

    def generation(self, folder: RunFolder) -> int:
        """Differs when steps were removed, and from that of a viewer that was started before."""
        return self._opened_ms + folder.generation


class RunCache:
    """Runs are numbered as they are found; a number stays that of its run. Folders above runs are searched again."""

    def __init__(self, paths: Sequence[Path], defaults: Defaults = no_defaults) -> None:
        self._defaults = defaults
        self._roots = [path.absolute() for path in paths]
        self._runs: list[RunHandle] = []
        self._lock = Lock()
        self._next_search = 0.0
        self.search()
        for given, root in zip(paths, self._roots, strict=True):
            if not any(run.path.is_relative_to(root) for run in self._runs):
                raise DataError(
                    f"{given} is no run directory and has none below it; give the folder of "
                    "trainer.default_local_dir (checkpoints/PROJECT/EXPERIMENT) or one above it"
                    if given.is_dir()
                    else f"{given} is no folder; give a run directory, or a folder above several"
                )

    def search(self) -> list[RunHandle]:
        """All runs, with those that have begun since. The search of a large tree takes at most 5 % of the time."""
        with self._lock:
            started = time.monotonic()
            if started >= self._next_search:
                known = {run.path for run in self._runs}
                found = {path for root in self._roots for path in run_directories(root)} - known
                for path in sorted(found, key=lambda path: (-_written(path), path)):
                    self._runs.append(RunHandle(len(self._runs), path, self._defaults))
                ended = time.monotonic()
                self._next_search = ended + 20 * (ended - started)
            return list(self._runs)

    def __getitem__(self, number: int) -> RunHandle:
        if number >= len(self._runs):
            raise NotFound(f"there is no run {number}")
        return self._runs[number]


def _status(file: Path) -> tuple[int, int]:
    """(time of the last write, size), or zeros if there is no such file."""
    try:
        found = file.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _written(run: Path) -> float:
    try:
        return (run / EVENTS_FILE).stat().st_mtime
    except OSError:
        return 0.0
