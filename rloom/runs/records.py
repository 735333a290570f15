"""The files that a run writes line by line: `metrics.jsonl`, `events.jsonl`, the dumped rollouts; and their readers.

A file only ever grows at its end or is replaced as a whole, so a reader beside the run sees whole lines and at
most one unfinished one. Readers check each record once, with the functions here: others may have written it.

`events.jsonl` has what a run did, in order. Every line has `time` (seconds since 1970) and `event`; all but `end` have
`step`:

    run          a process has started training after `step` (0: from the beginning): `total_steps`, `host`, `pid`
    stage_begin  `stage`: gen, reward, old_log_prob, update_actor, ...
    stage_end    `stage`, `seconds`
    generation   `spans`: [begin, end] of when the rollout engines had requests, since the event before it. Of runs that
                 generate ahead of training, whose generation is no stage of a step
    step         `metrics`
    validation   `metrics`; `measures`: by data source, whether they are its accuracy or its mean score
    warning      `kind`, `message`; a rollout mismatch also has `metric`, `value`, `threshold`, `engine_versions`,
                 `trainer_version`, and skipped updates `metric`, `value`
    end          `status`: finished, interrupted, or the type of the error, then with `message`
"""

import errno
import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from rloom.atomic import replace_text
from rloom.errors import DataError
from rloom.runs.measures import LABELS

log = logging.getLogger(__name__)
Record = TypeVar("Record")
LONGEST_LINE = 1 << 24  # bytes; a longer one is passed over, so that it is never in memory


def open_regular(file: Path) -> BinaryIO:
    """For reading. A FIFO would block for ever, and a link may lead to any file of the user: both are DataErrors."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{file.name} is a symbolic link; rloom writes none, and follows none in a run") from error
        raise DataError(f"{file.name} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{file} is not a regular file")
    return os.fdopen(handle, "rb")


class Appended(NamedTuple, Generic[Record]):
    records: list[Record]
    replaced: bool  # the file is another one, or shorter than before: `records` are all of its records


class JsonLines(Generic[Record]):
    """Each `read` returns the records that were completed since the last one.

    A line that is still being written is read when it is complete. `check` returns the record of a row, or None if a
    field is missing or has another type; such a line is skipped, and so is one that is not JSON or was cut short.
    """

    def __init__(self, file: Path, check: Callable[[dict[str, Any]], Record | None]) -> None:
        self._file, self._check = file, check
        self._restart(None)

    def _restart(self, inode: int | None) -> None:
        self._inode = inode
        self._position = 0  # after the last complete line
        self._in_long_line = False
        self.skipped = 0  # lines

    def read(self) -> Appended[Record]:
        try:
            lines = open_regular(self._file)
        except FileNotFoundError:
            replaced = self._inode is not None
            self._restart(None)
            return Appended([], replaced)
        with lines:
            status = os.fstat(lines.fileno())
            replaced = self._inode is not None and (status.st_ino != self._inode or status.st_size < self._position)
            if replaced or self._inode is None:
                self._restart(status.st_ino)
            lines.seek(self._position)
            return Appended(self._records(lines), replaced)

    def _records(self, lines: BinaryIO) -> list[Record]:
        found = []
        while part := lines.readline(LONGEST_LINE):
            ends = part.endswith(b"\n")
            if not ends and len(part) < LONGEST_LINE:  # still being written
                break
            self._position += len(part)
            is_long, self._in_long_line = self._in_long_line or not ends, not ends
            row = None if is_long else parse_row(part)
            record = None if row is None else self._check(row)
            if record is not None:
                found.append(record)
            elif ends and part.strip():
                self.skipped += 1
        return found


def parse_row(line: bytes) -> dict[str, Any] | None:
    """None: cut short by a crash, being written, not UTF-8, nested too deeply, or not an object."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


METRICS_FILE = "metrics.jsonl"
MOST_STEPS = 10**15  # every such integer is exact in JavaScript, too
LARGEST = 3.4028235e38  # the largest float32; a number beyond it counts as not finite


def is_whole(value: Any, most: int = MOST_STEPS) -> bool:
    """A step, a row, a count."""
    return type(value) is int and 0 <= value < most


def finite(value: Any) -> float | None:
    """None: not a number, or not a finite one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -LARGEST <= value <= LARGEST else None


def finite_metrics(values: Any) -> dict[str, float] | None:
    """Without those that are not finite, which are null in a file. None: not metrics."""
    if not isinstance(values, dict):
        return None
    try:
        return {
            name: float(value)
            for name, value in values.items()
            if value is not None and -LARGEST <= value <= LARGEST and name != "step"
        }
    except TypeError:  # a text, a list
        return None


def metrics_record(row: dict[str, Any]) -> dict[str, float] | None:
    """The metrics of a line of `metrics.jsonl`, with `step`. None: it is no such line."""
    known = finite_metrics({name: value for name, value in row.items() if name != "step"})
    return {"step": row["step"], **known} if known is not None and is_whole(row.get("step")) else None


def append_metrics(file: Path, step: int, metrics: Mapping[str, float]) -> None:
    line = to_line({"step": step, **metrics})
    with file.open("a", encoding="utf-8") as out:
        out.write(line)


def read_metrics(file: Path) -> list[dict[str, float]]:
    """One dict a step, in the order of the steps; what was logged for a step in several lines is merged.

    A line that is not a whole record is passed over, and so is a number that was not finite when it was logged.
    """
    steps: dict[int, dict[str, float]] = {}
    for record in JsonLines(file, metrics_record).read().records:
        steps.setdefault(int(record["step"]), {}).update(record)
    return [steps[step] for step in sorted(steps)]


def truncate_metrics(file: Path, last_step: float = math.inf) -> None:
    """Drop the records after `last_step`, and the line that a crash left unfinished."""
    try:
        with open_regular(file) as lines:
            *finished, _cut_short = lines.read().split(b"\n")
    except FileNotFoundError:
        return
    records = [(line, metrics_record(parse_row(line) or {})) for line in finished]
    kept = [line.decode() + "\n" for line, record in records if record is not None and record["step"] <= last_step]
    replace_text(file, "".join(kept))


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, "".join(to_line(row) for row in rows))


def to_line(record: Mapping[str, Any]) -> str:
    """Half of a surrogate pair, which answers and data files may hold, is no UTF-8: it becomes an escape of JSON."""
    line = json.dumps(to_json_value(record), ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "backslashreplace").decode()


def to_json_value(value: Any) -> Any:
    """As JSON has it. Ground truths come from data files and may hold anything, numpy's arrays and numbers too."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # JSON has no NaN: other readers stumble over it
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    to_python = getattr(value, "tolist", None)
    return str(value) if to_python is None else to_json_value(to_python())


EVENTS_FILE = "events.jsonl"
SCHEDULE_FILE = "schedule.jsonl"  # of a run that generates ahead of training
Event = dict[str, Any]
Check = Callable[[Any], bool]
LATEST = 1e11  # seconds since 1970
LARGEST_PROCESS = 1 << 31  # 0 and negative ones are groups of processes


def is_a(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


is_text = is_a(str)


def is_number(value: Any) -> bool:
    return finite(value) is not None


def is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def is_time(value: Any) -> bool:
    number = finite(value)
    return number is not None and 0 <= number < LATEST


def or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def are_measures(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(measure, str) and measure in LABELS for measure in value.values())


def are_spans(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(span, list) and len(span) == 2 for span in value)
    return pairs and all(is_time(begin) and is_time(end) and begin <= end for begin, end in value)


STEP: Mapping[str, Check] = {"step": is_whole}
METRICS: Mapping[str, Check] = {**STEP, "metrics": is_a(dict)}
# event -> the check of each field that readers rely on; a field that may be missing is None
FIELDS: Mapping[str, Mapping[str, Check]] = {
    "run": {
        **STEP,
        "total_steps": or_none(is_whole),
        "host": or_none(is_text),
        "pid": or_none(lambda value: is_whole(value, LARGEST_PROCESS) and value > 0),
        "command": or_none(is_text),
        "commit": or_none(is_text),
        "versions": or_none(is_texts),
    },
    "stage_begin": {**STEP, "stage": is_text},
    "stage_end": {**STEP, "stage": is_text, "seconds": is_time},
    "generation": {**STEP, "spans": are_spans},
    "step": METRICS,
    "validation": {**METRICS, "measures": or_none(are_measures)},
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
    """What cannot be written, on a full disk, is left out and reported once: events do not end a run."""

    def __init__(self, file: Path) -> None:
        self._file, self._reported = file, False
        self._ends_in_a_line = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")

    def write(self, event: str, **fields: Any) -> None:
        line = to_line({"time": time.time(), "event": event, **fields})
        try:
            with self._file.open("a", encoding="utf-8") as out:
                # a crash or a full disk may have cut the last line short: readers skip it
                out.write(line if self._ends_in_a_line else f"\n{line}")
            self._ends_in_a_line = True
        except OSError as error:
            self._ends_in_a_line = False
            if not self._reported:
                log.warning(f"{self._file} cannot be written ({error.strerror}): events are missing in it")
            self._reported = True
