"""`events.jsonl`: what a run did, in order. Lines are only ever appended, so a reader can follow a running run.

Every line has `time` (seconds since 1970) and `event`; all but `end` have `step`:

    run          a process has started training after `step` (0: from the beginning): `total_steps`, `host`, `pid`
    stage_begin  `stage`: gen, reward, old_log_prob, update_actor, ...
    stage_end    `stage`, `seconds`
    step         `metrics`
    validation   `metrics`
    warning      `kind`, `message`; a rollout mismatch also has `metric`, `value`, `threshold`, `engine_versions`,
                 `trainer_version`, and skipped updates `metric`, `value`
    end          `status`: finished, interrupted, or the type of the error, then with `message`
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rloom.runs.records import finite, finite_metrics, is_whole, to_line

EVENTS_FILE = "events.jsonl"
Event = dict[str, Any]
Check = Callable[[Any], bool]
LATEST = 1e11  # seconds since 1970
LARGEST_PROCESS = 1 << 31  # 0 and negative ones are groups of processes


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_time(value: Any) -> bool:
    number = finite(value)
    return number is not None and 0 <= number < LATEST


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


STEP: Mapping[str, Check] = {"step": is_whole}
METRICS: Mapping[str, Check] = {**STEP, "metrics": lambda value: isinstance(value, dict)}
# event -> the check of each field that readers rely on; a field that may be missing is None
FIELDS: Mapping[str, Mapping[str, Check]] = {
    "run": {
        **STEP,
        "total_steps": or_none(is_whole),
        "host": or_none(is_text),
        "pid": or_none(lambda value: is_whole(value, LARGEST_PROCESS) and value > 0),
    },
    "stage_begin": {**STEP, "stage": is_text},
    "stage_end": {**STEP, "stage": is_text, "seconds": is_time},
    "step": METRICS,
    "validation": METRICS,
    "warning": {**STEP, "kind": is_text, "message": is_text},
    "end": {"status": is_text, "message": or_none(is_text)},
}


def read_event(row: Event) -> Event | None:
    """The event of a line, with fields of the right types and finite metrics. None: it is no event."""
    kind = row.get("event")
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or not is_time(row.get("time")) or not all(fits(row.get(name)) for name, fits in fields.items()):
        return None
    if "metrics" not in fields:
        return row
    metrics = finite_metrics(row["metrics"])
    return None if metrics is None else {**row, "metrics": metrics}


class EventLog:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._ends_in_a_line = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")

    def write(self, event: str, **fields: Any) -> None:
        line = to_line({"time": time.time(), "event": event, **fields})
        with self._file.open("a", encoding="utf-8") as out:
            # a crash may have cut the last line short: readers skip it
            out.write(line if self._ends_in_a_line else f"\n{line}")
        self._ends_in_a_line = True
