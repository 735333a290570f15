"""`metrics.jsonl` of the run directory. Every run has it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rloom.runs.records import METRICS_FILE, append_metrics, truncate_metrics
from rloom.runs.trackers.base import Cell


class FileTracker:
    """One JSON object per line, on disk when `log` returns."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = run_dir / METRICS_FILE
        truncate_metrics(self._file)  # removes a line that a crash left incomplete

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_metrics(self._file, step, metrics)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        pass  # answers are dumped by `trainer.log_rollouts` and `trainer.validation_data_dir`

    def close(self, *, failed: bool = False) -> None:
        pass  # `log` opens and closes the file
