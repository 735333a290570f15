"""The files a run writes line by line: `metrics.jsonl` and the dumped rollouts; and the types of what is in them.

A file only ever grows at its end or is replaced as a whole, so a reader beside the run sees whole lines and at
most one unfinished one. Readers check each record once, with the functions here: others may have written it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rloom.atomic import replace_text
from rloom.runs.json_lines import open_regular, parse_row

METRICS_FILE = "metrics.jsonl"
MOST_STEPS = 10**15  # every such integer is exact in JavaScript, too
LARGEST = 3.4028235e38  # of float32; a number beyond it counts as not finite


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
    """Of a line of `metrics.jsonl`: its metrics, with `step`. None: it is no such line."""
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
    for _, record in _whole_records(file):
        steps.setdefault(int(record["step"]), {}).update(record)
    return [steps[step] for step in sorted(steps)]


def truncate_metrics(file: Path, last_step: float = math.inf) -> None:
    """Drop the records after `last_step`, and the line that a crash left unfinished."""
    if not file.exists():
        return
    kept = [line for line, record in _whole_records(file) if record["step"] <= last_step]
    replace_text(file, "".join(kept))


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, "".join(to_line(row) for row in rows))


def _whole_records(file: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Every finished line with its record. What a crash cut short or garbled is not a record any more."""
    try:
        with open_regular(file) as lines:
            *finished, _cut_short = lines.read().split(b"\n")
    except FileNotFoundError:
        return
    for line in finished:
        row = parse_row(line)
        record = None if row is None else metrics_record(row)
        if record is not None:
            yield line.decode() + "\n", record


def to_line(record: Mapping[str, Any]) -> str:
    """Half of a surrogate pair, which answers and data files may hold, is no UTF-8: it becomes an escape of JSON."""
    line = json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"
    return line.encode("utf-8", "backslashreplace").decode()


def plain(value: Any) -> Any:
    """As JSON has it. Ground truths come from data files and may hold anything, numpy's arrays and numbers too."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # JSON has no NaN: other readers stumble over it
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    to_python = getattr(value, "tolist", None)
    return str(value) if to_python is None else plain(to_python())
