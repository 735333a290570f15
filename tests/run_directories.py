"""Run directories written by hand, with rloom's own writers."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rloom.runs.records import EventLog, append_metrics, truncate_metrics


def write_run(
    path: Path,
    config: Mapping[str, Any],
    steps: Mapping[int, Mapping[str, float]],
    *,
    end: str | None = None,
    total_steps: int | None = None,
    resumed_from: int = 0,
    time: float | None = None,
) -> Path:
    """A run with these metrics by step; without `end`, it is that of this process and still goes on."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(dict(config)) if config else "")
    truncate_metrics(path / "metrics.jsonl", resumed_from)
    events = EventLog(path / "events.jsonl")
    when = {} if time is None else {"time": time}
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    events.write("run", step=resumed_from, total_steps=total_steps, **owner, **when)
    for step, metrics in steps.items():
        append_metrics(path / "metrics.jsonl", step, metrics)
        events.write("validation" if step == 0 else "step", step=step, metrics=metrics, **when)
    if end is not None:
        events.write("end", status=end, **when)
    return path
