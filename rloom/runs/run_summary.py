"""A run in one line: state, last reward, accuracy. Files are searched, not parsed: hundreds of runs take seconds."""

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.runs.display import validation_accuracies
from rloom.runs.events import EVENTS_FILE, Event, read_event
from rloom.runs.json_lines import LONGEST_LINE, open_regular, parse_row
from rloom.runs.records import METRICS_FILE, metrics_record
from rloom.runs.run_folder import RunState, Status, read_config, run_directories, run_name, state_of

# as EventLog writes them; inside a text the quotes would be escaped
RUN_EVENT, STEP_EVENT = b'"event": "run"', b'"event": "step"'
REWARD = "critic/score/mean"


@dataclass(frozen=True)
class Accuracy:
    """Of one data source, in the validations of a run."""

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
    fault: str | None = None  # of its config.yaml


def summarize(path: Path) -> RunSummary:
    """A run whose files cannot be read has the state `unreadable`, with the reason: the others are still listed."""
    try:
        config = read_config(path)
        reward, validations = read_ends(path / METRICS_FILE)
        return RunSummary(
            path,
            run_name(path),
            state_of(last_events(path / EVENTS_FILE)),
            reward,
            accuracies(validations),
            algorithm_of(config.values),
            model_of(config.values),
            config.fault,
        )
    except Exception as error:  # of any kind
        reason = str(error) or type(error).__name__
        state = RunState(Status.UNREADABLE, step=0, total_steps=None, started=None, updated=None, error=reason)
        return RunSummary(path, run_name(path), state, None, {}, None, None)


def summaries(roots: Sequence[Path]) -> list[RunSummary]:
    """Of every run directory at `roots` and below, the last written first."""
    folders = dict.fromkeys(folder.absolute() for root in roots for folder in run_directories(root))
    found = [summarize(folder) for folder in folders]
    return sorted(found, key=lambda summary: summary.state.updated or 0.0, reverse=True)


def algorithm_of(config: Mapping[str, Any]) -> str | None:
    """The estimator; `sft` for supervised fine-tuning, whose configuration has no section of that name."""
    if "algorithm" in config:
        return _at(config, "algorithm.adv_estimator")
    return "sft" if "model" in config else None


def model_of(config: Mapping[str, Any]) -> str | None:
    return _at(config, "actor_rollout_ref.model.path") or _at(config, "model.path")


def accuracies(validations: Mapping[int, Mapping[str, float]]) -> dict[str, Accuracy]:
    """`validations`: metrics by step, in the order of the steps."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, metrics in validations.items():
        for source, value in validation_accuracies(metrics).items():
            curves.setdefault(source, []).append((step, value))
    found = {}
    for source, curve in curves.items():
        (first_step, first), (last_step, last) = curve[0], curve[-1]
        best_step, best = max(curve, key=lambda point: point[1])
        found[source] = Accuracy(first, first_step, last, last_step, best, best_step)
    return found


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
    """The event of the process that ran last, its last step, and its last event."""
    with mapped(file) as text:
        run = text.rfind(RUN_EVENT)
        if run < 0:
            return []
        step = text.rfind(STEP_EVENT, run)
        last = text.rfind(b"\n", 0, text.rfind(b"\n"))  # of the last complete line: the end of the one before
        lines = [line_at(text, position) for position in (run, step, last + 1) if position >= 0]
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
