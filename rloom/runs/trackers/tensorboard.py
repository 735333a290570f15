"""TensorBoard: event files in `runs/`, or in TENSORBOARD_DIR."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloom.runs.trackers.base import Cell, Start, import_library

ROOT = "runs"
VARIABLE = "TENSORBOARD_DIR"  # the whole folder, as in verl


class TensorboardTracker:
    def __init__(self, folder: Path) -> None:
        self._module = import_library(
            "torch.utils.tensorboard", logger="tensorboard", install=f"{sys.executable} -m pip install tensorboard"
        )
        self._folder = folder
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        writer = self._open(step)
        writer.add_text(name, as_markdown(columns, rows), step)
        writer.flush()

    def close(self, *, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            # a resumed run may start before the last logged step: hide the later steps of the previous run
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=step)
        return self._writer


def start(given: Start) -> TensorboardTracker:
    folder = folder_of(given.run_dir, given.project, given.experiment)
    tracker = TensorboardTracker(folder)
    given.report(f"tensorboard: events in {folder}; `tensorboard --logdir {ROOT}` shows all runs")
    return tracker


def folder_of(run_dir: Path, project: str, experiment: str) -> Path:
    """`runs/PROJECT/EXPERIMENT` below the current directory, or TENSORBOARD_DIR.

    A run directory of another name is appended: runs with equal names would hide each other's curves.
    """
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]).expanduser()
    folder = Path(ROOT, project, experiment)
    is_default = run_dir.parts[-2:] == (project, experiment)
    return folder if is_default else folder / run_dir.name


def as_markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """One paragraph a cell. Text is an indented block, in which markup is shown as it is written."""
    answers = [
        "\n\n".join(f"**{column}**\n\n{indented(value)}" for column, value in zip(columns, row, strict=True))
        for row in rows
    ]
    return "\n\n---\n\n".join(answers)


def indented(value: Cell) -> str:
    return "\n".join(f"    {line}" for line in str(value).splitlines() or [""])
