"""Reading a run directory, also while the run writes to it. Imports no torch.

Its files may be anyone's: every record is checked when it is read, and what does not fit is skipped and counted.
"""

import math
import mmap
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rloom.errors import DataError
from rloom.runs.measures import measures_of, validation_accuracies
from rloom.runs.records import (
    EVENTS_FILE,
    LONGEST_LINE,
    METRICS_FILE,
    Event,
    JsonLines,
    is_whole,
    metrics_record,
    open_regular,
    parse_row,
    read_event,
)

CONFIG_FILE = "config.yaml"  # in the run directory and in every checkpoint
MARKS = (CONFIG_FILE, EVENTS_FILE, METRICS_FILE)  # a folder with any of them is a run directory
LARGEST_CONFIG = 1 << 20  # bytes
DEEPEST_CONFIG = 32  # sections inside of each other
SILENT_AFTER_S = 600.0  # a run of another machine whose last event is older may have been killed


class Status(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    KILLED = "killed"  # its process is gone and wrote no `end`
    UNREADABLE = "unreadable"  # by a fault of its files
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
    updated: float | None  # time of the last event
    error: str | None  # type of the error that ended it, or why it cannot be read


class SavedConfig(NamedTuple):
    values: dict[str, Any]  # nested, as JSON has it; empty if the file is missing or cannot be read
    fault: str | None  # why it cannot be read


class RunFolder:
    """What a run has written. `refresh` reads what was appended since."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        if not is_run(self.path):
            raise DataError(f"{path} is no run directory: it has none of {', '.join(MARKS)}")
        self.name = run_name(self.path)
        self.generation = 0  # changes when steps are removed: a resumed run writes them again
        self.events: list[Event] = []  # in effect
        self._metrics: dict[int, dict[str, float]] = {}
        self._validated: dict[int, None] = {}  # steps with a validation
        self._lines = JsonLines(self.path / EVENTS_FILE, read_event)
        self._config = SavedConfig({}, None)
        self._config_time = 0
        self.refresh()

    def refresh(self) -> bool:
        """Whether there was anything new."""
        appended, replaced = self._lines.read()
        if replaced:
            self._remove_after(-1)
        for event in appended:
            self._add(event)
        return bool(appended) or replaced

    @property
    def config(self) -> dict[str, Any]:
        """As in config.yaml, nested; empty if the file is missing or cannot be read."""
        return self._saved_config().values

    @property
    def config_fault(self) -> str | None:
        """Why config.yaml cannot be read."""
        return self._saved_config().fault

    @property
    def skipped(self) -> int:
        """Records of events.jsonl that do not fit."""
        return self._lines.skipped

    @property
    def faults(self) -> list[str]:
        """What of the run is not shown, and why."""
        fault, skipped = self.config_fault, self.skipped
        records = "1 record does not fit and is" if skipped == 1 else f"{skipped:,} records do not fit and are"
        return [*([fault] if fault else []), *([f"{EVENTS_FILE}: {records} left out"] if skipped else [])]

    def _saved_config(self) -> SavedConfig:
        try:
            written = (self.path / CONFIG_FILE).lstat().st_mtime_ns
        except OSError:
            return SavedConfig({}, None)
        if written != self._config_time:
            self._config, self._config_time = read_config(self.path), written
        return self._config

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict for each step, with its validation's metrics, in the order of the steps."""
        return [self._metrics[step] for step in sorted(self._metrics)]

    @property
    def measures(self) -> dict[str, str]:
        """By data source, what its validations measure."""
        validations = [self._metrics[step] for step in self._validated if step in self._metrics]
        return measures_of(validations, recorded_measures(self.events))

    @property
    def state(self) -> RunState:
        return state_of(self.events)

    def _add(self, event: Event) -> None:
        if event["event"] == "run":
            self._remove_after(event["step"])
        self.events.append(event)
        if event["event"] in ("step", "validation"):
            self._metrics.setdefault(event["step"], {"step": event["step"]}).update(event["metrics"])
            if validation_accuracies(event["metrics"]):
                self._validated[event["step"]] = None

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
    updated = events[-1]["time"] if events else None
    status, error = Status.UNKNOWN, None
    if end is not None and end["event"] == "end":
        as_planned = end["status"] in (Status.FINISHED, Status.INTERRUPTED)
        status, error = (Status(end["status"]), None) if as_planned else (Status.FAILED, end["status"])
    elif run is not None:
        status = unfinished(run, updated)
    return RunState(
        status,
        step=max(steps, default=0 if run is None else run["step"]),
        total_steps=None if run is None else run.get("total_steps"),
        started=None if run is None else run["time"],
        updated=updated,
        error=error,
    )


def recorded_measures(events: Sequence[Event]) -> dict[str, str]:
    """Of the last validation; empty if an older version wrote it."""
    last = next((event for event in reversed(events) if event["event"] == "validation"), {})
    return last.get("measures") or {}


def is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / mark) for mark in MARKS)


def run_name(path: Path) -> str:
    """PROJECT/EXPERIMENT, as the default run directory is named."""
    return "/".join(path.parts[-2:])


def read_config(path: Path) -> SavedConfig:
    """The config.yaml of a run directory."""
    try:
        with open_regular(path / CONFIG_FILE) as file:
            content = file.read(LARGEST_CONFIG + 1)
        if len(content) > LARGEST_CONFIG:
            raise DataError(f"it has more than {LARGEST_CONFIG:,} bytes")
        text = content.decode()
        check_structure(text)
        loaded = yaml.load(text, Loader=_LOADER)
        if not isinstance(loaded, dict | None):
            raise DataError("it holds no configuration")
        return SavedConfig(as_json_has_it(loaded or {}), None)
    except FileNotFoundError:
        return SavedConfig({}, None)
    except (OSError, ValueError, OverflowError, TypeError, yaml.YAMLError, DataError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return SavedConfig({}, f"{CONFIG_FILE} cannot be read: {reason}")


def check_structure(text: str) -> None:
    """Before it is loaded: libyaml crashes on deep nesting, and a few lines of aliases make gigabytes of values."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise DataError("it has a YAML alias, which rloom never writes")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_CONFIG:
            raise DataError(f"it has more than {DEEPEST_CONFIG} sections or lists inside of each other")


def as_json_has_it(value: Any) -> Any:
    """YAML also has dates, sets, bytes, keys that are no text, and numbers that JSON and JavaScript do not have."""
    if isinstance(value, dict):
        return {str(as_json_has_it(name)): as_json_has_it(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_json_has_it(inner) for inner in value]
    if value is None or isinstance(value, str | bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, int):
        return value if is_whole(abs(value), 1 << 63) else f"an integer of {value.bit_length()} bits"
    return str(value)


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


def unfinished(run: Event, updated: float | None) -> Status:
    """`run`: the event of the process that ran last, which has written no `end`."""
    if run.get("host") == socket.gethostname() and run.get("pid") is not None:
        return Status.RUNNING if is_alive(run["pid"]) else Status.KILLED
    recent = updated is not None and time.time() - updated < SILENT_AFTER_S
    return Status.RUNNING if recent else Status.UNKNOWN


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where libyaml is there


# as EventLog writes them; inside a text the quotes would be escaped
RUN_EVENT, STEP_EVENT, VALIDATION_EVENT = (f'"event": "{name}"'.encode() for name in ("run", "step", "validation"))
REWARD = "critic/score/mean"


@dataclass(frozen=True)
class Accuracy:
    """Accuracies, or mean scores, on one data source in the validations of a run."""

    measure: str  # accuracy or score
    first: float
    first_step: int
    last: float
    last_step: int
    best: float
    best_step: int


@dataclass(frozen=True)
class RunSummary:
    path: Path
    name: str
    state: RunState
    reward: float | None  # mean score of the last step
    accuracy: Mapping[str, Accuracy]  # by data source
    algorithm: str | None
    model: str | None
    fault: str | None = None  # why config.yaml cannot be read


def summarize(path: Path) -> RunSummary:
    """A run whose files cannot be read has the state `unreadable`, with the reason: the others are still listed."""
    try:
        config = read_config(path)
        events = last_events(path / EVENTS_FILE)
        reward, validations = read_ends(path / METRICS_FILE)
        return RunSummary(
            path,
            run_name(path),
            state_of(events),
            reward,
            accuracies(validations, recorded_measures(events)),
            algorithm_of(config.values),
            _at(config.values, "actor_rollout_ref.model.path") or _at(config.values, "model.path"),
            config.fault,
        )
    except Exception as error:  # any fault of the run's files
        reason = str(error) or type(error).__name__
        state = RunState(Status.UNREADABLE, step=0, total_steps=None, started=None, updated=None, error=reason)
        return RunSummary(path, run_name(path), state, None, {}, None, None)


def summaries(roots: Sequence[Path]) -> list[RunSummary]:
    """Summaries of every run directory at `roots` and below, the last written first."""
    folders = dict.fromkeys(folder.absolute() for root in roots for folder in run_directories(root))
    found = [summarize(folder) for folder in folders]
    return sorted(found, key=lambda summary: summary.state.updated or 0.0, reverse=True)


def algorithm_of(config: Mapping[str, Any]) -> str | None:
    """The estimator; `sft` for supervised fine-tuning, whose configuration has no section of that name."""
    if "algorithm" in config:
        return _at(config, "algorithm.adv_estimator")
    return "sft" if "model" in config else None


def accuracies(validations: Mapping[int, Mapping[str, float]], recorded: Mapping[str, str]) -> dict[str, Accuracy]:
    """`validations`: metrics by step, in the order of the steps. `recorded`: as in `measures_of`."""
    measures = measures_of(list(validations.values()), recorded)
    found = {}
    for source, points in accuracy_curves(validations.values()).items():
        curve = list(points.items())
        (first_step, first), (last_step, last) = curve[0], curve[-1]
        best_step, best = max(curve, key=lambda point: point[1])
        found[source] = Accuracy(measures[source], first, first_step, last, last_step, best, best_step)
    return found


def accuracy_curves(rows: Iterable[Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """By data source, then by step."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        for source, value in validation_accuracies(row).items():
            curves.setdefault(source, {})[int(row["step"])] = value
    return curves


def read_ends(file: Path) -> tuple[float | None, dict[int, dict[str, float]]]:
    """The last reward and all validations of a metrics.jsonl. The other lines are not parsed."""
    validations: dict[int, dict[str, float]] = {}
    with mapped(file) as text:
        rewards = (record.get(REWARD) for record in records_with(text, REWARD.encode(), backwards=True))
        reward = next((value for value in rewards if value is not None), None)
        for record in records_with(text, b'"val-core/'):
            validations.setdefault(int(record["step"]), {}).update(record)
    return reward, dict(sorted(validations.items()))


def last_events(file: Path) -> list[Event]:
    """The last validation, the event of the process that ran last, its last step, and its last event."""
    with mapped(file) as text:
        run = text.rfind(RUN_EVENT)
        if run < 0:
            return []
        step = text.rfind(STEP_EVENT, run)
        last = text.rfind(b"\n", 0, text.rfind(b"\n"))  # where the last complete line begins: the end of the one before
        positions = (text.rfind(VALIDATION_EVENT), run, step, last + 1)
        lines = [line_at(text, position) for position in positions if position >= 0]
    rows = [row for row in map(parse_row, dict.fromkeys(lines)) if row is not None]
    return [event for event in map(read_event, rows) if event is not None]


@contextmanager
def mapped(file: Path) -> Iterator[mmap.mmap | bytes]:
    """A file that is searched without reading it into Python; empty if there is none."""
    try:
        with open_regular(file) as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as text:
            yield text
    except (FileNotFoundError, ValueError):  # an empty file cannot be mapped
        yield b""


def records_with(text: mmap.mmap | bytes, word: bytes, *, backwards: bool = False) -> Iterator[dict[str, float]]:
    """The records of a metrics.jsonl whose lines hold `word`, one after the other."""
    position = text.rfind(word) if backwards else text.find(word)
    while position >= 0:
        row = parse_row(line_at(text, position))
        record = None if row is None else metrics_record(row)
        if record is not None:
            yield record
        if backwards:
            position = text.rfind(word, 0, text.rfind(b"\n", 0, position) + 1)
        else:
            end = text.find(b"\n", position)
            position = text.find(word, end) if end >= 0 else -1


def line_at(text: mmap.mmap | bytes, position: int) -> bytes:
    """Empty if it is too long."""
    start, end = text.rfind(b"\n", 0, position) + 1, text.find(b"\n", position)
    end = end if end >= 0 else len(text)
    return text[start:end] if end - start <= LONGEST_LINE else b""


def _at(config: Mapping[str, Any], path: str) -> str | None:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else str(found)
