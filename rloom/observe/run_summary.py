"""A run in one line: state, last reward, accuracy. Reads the ends of a run's files, so that hundreds take a second."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.observe.display import validation_accuracies
from rloom.observe.events import EVENTS_FILE, Event
from rloom.observe.records import METRICS_FILE
from rloom.observe.run_folder import RunState, read_config, run_directories, run_name, state_of

TAIL_BYTES = 256 * 1024  # holds the events of several steps
BLOCK_BYTES = 1024 * 1024
RUN_EVENT = b'"event": "run"'  # as EventLog writes it; inside a text the quotes would be escaped
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


def summarize(path: Path) -> RunSummary:
    config = read_config(path)
    reward, validations = read_ends(path / METRICS_FILE)
    return RunSummary(
        path,
        run_name(path),
        state_of(last_events(path / EVENTS_FILE)),
        reward,
        accuracies(validations),
        algorithm_of(config),
        model_of(config),
    )


def summaries(root: Path) -> list[RunSummary]:
    """Of every run directory at `root` and below, the last written first."""
    found = [summarize(folder.absolute()) for folder in run_directories(root)]
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
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError:
        return None, {}
    rewards = (row[REWARD] for row in _rows(line for line in reversed(lines) if REWARD.encode() in line))
    reward = next((value for value in rewards if value is not None), None)
    validations: dict[int, dict[str, float]] = {}
    for row in _rows(line for line in lines if b'"val-core/' in line):
        known = {name: value for name, value in row.items() if value is not None}
        validations.setdefault(int(row["step"]), {}).update(known)
    return reward, dict(sorted(validations.items()))


def last_events(file: Path) -> list[Event]:
    """The event of the process that ran last, and the newest of those after it."""
    try:
        with file.open("rb") as source:
            size = source.seek(0, 2)
            start = max(0, size - TAIL_BYTES)
            source.seek(start)
            lines = source.read().split(b"\n")
            tail = [event for event in _rows(lines[1:] if start else lines) if isinstance(event.get("event"), str)]
            begun = [index for index, event in enumerate(tail) if event["event"] == "run"]
            if begun:
                return tail[begun[-1] :]
            return [*_rows(_last_line_with(source, RUN_EVENT, start)), *tail]
    except OSError:
        return []


def _last_line_with(source: Any, text: bytes, end: int) -> Iterator[bytes]:
    """The last line before `end` that holds `text`, read backwards in blocks."""
    rest = b""  # the beginning of the line that the block after this one starts in the middle of
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        source.seek(start)
        lines = (source.read(end - start) + rest).split(b"\n")
        complete = lines if start == 0 else lines[1:]
        for line in reversed(complete):
            if text in line:
                yield line
                return
        rest, end = lines[0], start


def _rows(lines: Iterator[bytes] | list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # being written, or cut short by a crash
            continue
        if isinstance(row, dict):
            yield row


def _at(config: Mapping[str, Any], path: str) -> str | None:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else str(found)
