"""Reading a run directory, also while the run writes to it. Imports no torch."""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from rloom.errors import DataError
from rloom.observe.events import EVENTS_FILE, Event
from rloom.observe.json_lines import JsonLines
from rloom.observe.records import METRICS_FILE

CONFIG_FILE = "config.yaml"
MARKS = (CONFIG_FILE, EVENTS_FILE, METRICS_FILE)  # a folder with any of them is a run directory
SILENT_AFTER_S = 600.0  # a run of another machine whose last event is older may have been killed


class Status(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"  # its process is gone and wrote no `end`
    UNKNOWN = "unknown"  # no step yet, or the process is on another machine and has written nothing for some time

    @property
    def is_final(self) -> bool:
        """It stays until the run is started again."""
        return self in (Status.FINISHED, Status.INTERRUPTED, Status.FAILED, Status.KILLED)


@dataclass(frozen=True)
class RunState:
    status: Status
    step: int  # the last completed one
    total_steps: int | None
    started: float | None  # seconds since 1970: of the process that ran last
    updated: float | None  # of the last event
    error: str | None  # type of the error that ended it


class RunFolder:
    """What a run has written. `refresh` reads what was appended since."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if not is_run(self.path):
            raise DataError(f"{path} is no run directory: it has none of {', '.join(MARKS)}")
        self.name = run_name(self.path)
        self.generation = 0  # changes when steps are removed: a resumed run writes them anew
        self.events: list[Event] = []  # in effect
        self._metrics: dict[int, dict[str, float]] = {}
        self._lines = JsonLines(self.path / EVENTS_FILE)
        self._config: dict[str, Any] = {}
        self._config_time = 0
        self.refresh()

    def refresh(self) -> bool:
        """Whether there was anything new."""
        appended, replaced = self._lines.read()
        if replaced:
            self._remove_after(-1)
        for event in appended:
            if isinstance(event.get("event"), str):
                self._add(event)
        return bool(appended) or replaced

    @property
    def config(self) -> dict[str, Any]:
        """As in config.yaml, nested; empty if the file is missing or damaged."""
        try:
            written = (self.path / CONFIG_FILE).stat().st_mtime_ns
        except OSError:
            return {}
        if written != self._config_time:
            self._config, self._config_time = read_config(self.path), written
        return self._config

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict for each step, with its validation's metrics, in the order of the steps."""
        return [self._metrics[step] for step in sorted(self._metrics)]

    @property
    def state(self) -> RunState:
        return state_of(self.events)

    def _add(self, event: Event) -> None:
        if event["event"] == "run":
            self._remove_after(event["step"])
        self.events.append(event)
        if event["event"] in ("step", "validation"):
            known = {name: value for name, value in event["metrics"].items() if value is not None}
            self._metrics.setdefault(event["step"], {"step": event["step"]}).update(known)

    def _remove_after(self, step: int) -> None:
        """A run that resumed from `step` replaces what an earlier process wrote of later steps."""
        kept = [event for event in self.events if event.get("step", 0) <= step]
        if len(kept) < len(self.events):
            self.generation += 1
        self.events = kept
        self._metrics = {number: found for number, found in self._metrics.items() if number <= step}


def state_of(events: Sequence[Event]) -> RunState:
    """`events`: in effect, or the newest of them with the last `run` before them."""
    run = next((event for event in reversed(events) if event["event"] == "run"), None)
    end = next((event for event in reversed(events) if event["event"] in ("run", "end")), None)
    steps = [event["step"] for event in events if event["event"] == "step"]
    updated = events[-1].get("time") if events else None
    status, error = Status.UNKNOWN, None
    if end is not None and end["event"] == "end":
        status, error = ended(str(end.get("status")))
    elif run is not None:
        status = unfinished(run, updated)
    return RunState(
        status,
        step=max(steps, default=0 if run is None else run["step"]),
        total_steps=None if run is None else run.get("total_steps"),
        started=None if run is None else run.get("time"),
        updated=updated,
        error=error,
    )


def is_run(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


def run_name(path: Path) -> str:
    """PROJECT/EXPERIMENT, as the default run directory is named."""
    return "/".join(path.parts[-2:])


def read_config(path: Path) -> dict[str, Any]:
    """The config.yaml of a run directory, nested; empty if the file is missing or damaged."""
    try:
        loaded = yaml.load((path / CONFIG_FILE).read_text(encoding="utf-8"), Loader=_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def run_directories(root: Path) -> Iterator[Path]:
    """A run directory is not searched for others: what is below it are its checkpoints and dumps."""
    for folder, below, files in os.walk(root):
        if not set(MARKS).isdisjoint(files):
            below.clear()
            yield Path(folder)
        below.sort()


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"algorithm": {"lam": 0.95}} -> {"algorithm.lam": 0.95}"""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_config(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def ended(status: str) -> tuple[Status, str | None]:
    if status in (Status.FINISHED, Status.INTERRUPTED):
        return Status(status), None
    return Status.FAILED, status


def unfinished(run: Event, updated: float | None) -> Status:
    """`run`: the event of the process that ran last, which has written no `end`."""
    if run.get("host") == socket.gethostname() and isinstance(run.get("pid"), int):
        return Status.RUNNING if is_alive(run["pid"]) else Status.KILLED
    recent = updated is not None and time.time() - updated < SILENT_AFTER_S
    return Status.RUNNING if recent else Status.UNKNOWN


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where libyaml is there
