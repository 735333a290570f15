"""The files a run writes line by line: `metrics.jsonl` and the dumped rollouts.

A file only ever grows at its end or is replaced as a whole, so a reader beside the run sees whole lines and at
most one unfinished one.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rloom.atomic import replace_text

METRICS_FILE = "metrics.jsonl"


def append_metrics(file: Path, step: int, metrics: Mapping[str, float]) -> None:
    line = _to_line({"step": step, **metrics})
    with file.open("a", encoding="utf-8") as out:
        out.write(line)


def read_metrics(file: Path) -> list[dict[str, float]]:
    """One dict a step, in the order of the steps; what was logged for a step in several lines is merged.

    A line that is not a whole record is passed over, and so is a number that was not finite when it was logged.
    """
    steps: dict[int, dict[str, float]] = {}
    for _, record in _whole_records(file):
        known = {name: value for name, value in record.items() if value is not None}
        steps.setdefault(record["step"], {}).update(known)
    return [steps[step] for step in sorted(steps)]


def truncate_metrics(file: Path, last_step: float = math.inf) -> None:
    """Drop the records after `last_step`, and the line that a crash left unfinished."""
    if not file.exists():
        return
    kept = [line for line, record in _whole_records(file) if record["step"] <= last_step]
    replace_text(file, "".join(kept))


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, "".join(_to_line(row) for row in rows))


def _whole_records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every finished line with what it says. What a crash cut short or garbled is not a record any more."""
    if not file.exists():
        return
    *finished, _cut_short = file.read_bytes().decode("utf-8", errors="replace").split("\n")
    for line in finished:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "step" in record:
            yield line + "\n", record


def _to_line(record: Mapping[str, Any]) -> str:
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"


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
