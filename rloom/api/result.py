"""What `rloom.train` returns."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rloom.launch.export import export
from rloom.launch.job import Outcome
from rloom.launch.run import CURVE
from rloom.runs.curve import draw_learning_curve
from rloom.runs.display import validation_accuracies
from rloom.runs.events import Event
from rloom.runs.records import METRICS_FILE
from rloom.runs.run_folder import RunFolder


@dataclass(frozen=True, repr=False)
class TrainResult:
    run_dir: Path
    checkpoint: Path  # of the last step: a global_step_N folder
    history: Sequence[Mapping[str, float]]  # the metrics of each step, with `step`; 0: the validation before training
    validation: Mapping[str, float]  # the metrics of the last validation; empty if there was none
    stopped_early: bool  # by a callback

    @property
    def steps(self) -> int:
        """Completed steps, those before a resume included."""
        return int(self.history[-1]["step"]) if self.history else 0

    def export(self, folder: str | Path, *, adapter: bool = False, dtype: str = "float32") -> Path:
        """Write the policy as a Hugging Face folder, as `rloom export` does."""
        return export(self.checkpoint, Path(folder).expanduser(), adapter=adapter, dtype=dtype)

    def curve(self) -> Path:
        """The picture of the learning curve, a PNG file."""
        return draw_learning_curve(self.run_dir / METRICS_FILE, self.run_dir / CURVE)

    def __repr__(self) -> str:
        return f"TrainResult({', '.join(f'{name}={value}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        """For notebooks: the facts and the learning curve."""
        picture = base64.b64encode(self.curve().read_bytes()).decode()
        facts = "<br>".join(f"<b>{escape(name)}</b> {escape(value)}" for name, value in self._facts().items())
        return f'<div>{facts}</div><img style="max-width: 100%" src="data:image/png;base64,{picture}">'

    def _facts(self) -> dict[str, str]:
        accuracies = {
            f"accuracy on {name}": f"{value:.3g}" for name, value in validation_accuracies(self.validation).items()
        }
        return {
            "steps": f"{self.steps}{' (stopped early)' if self.stopped_early else ''}",
            **accuracies,
            "checkpoint": str(self.checkpoint),
        }


def result_of(outcome: Outcome) -> TrainResult:
    assert outcome.checkpoint is not None  # a run that trains saves its last step
    run = RunFolder(outcome.directory)
    return TrainResult(
        run_dir=outcome.directory,
        checkpoint=outcome.checkpoint,
        history=run.metrics,
        validation=last_validation(run.events),
        stopped_early=outcome.stopped_early,
    )


def last_validation(events: Sequence[Event]) -> dict[str, float]:
    found = [event["metrics"] for event in events if event["event"] == "validation"]
    return {name: value for name, value in found[-1].items() if value is not None} if found else {}
