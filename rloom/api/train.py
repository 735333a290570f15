"""`rloom.train`: one run, called from Python."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from rloom.api.arguments import configured
from rloom.api.config import Source
from rloom.launch.directory import claimed
from rloom.launch.export import export
from rloom.launch.job import Outcome
from rloom.launch.run import CURVE, Caller, run
from rloom.runs.curve import draw_learning_curve
from rloom.runs.measures import validation_accuracies
from rloom.runs.records import METRICS_FILE, Event
from rloom.runs.run_folder import RunFolder
from rloom.runtime.fork_server import fork_server
from rloom.training.steps import AfterStep


@dataclass(frozen=True, repr=False)
class TrainResult:
    run_dir: Path
    checkpoint: Path  # the last step's: a global_step_N folder
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
            f"validation on {name}": f"{value:.3g}" for name, value in validation_accuracies(self.validation).items()
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


class StopTraining(Exception):
    """Raised by a callback: the step is saved and `rloom.train` returns."""


@dataclass(frozen=True)
class Answer:
    """One answer of a step."""

    prompt: str  # as rendered by the chat template
    text: str
    score: float | None  # None: it failed
    reason: str | None  # why the score failed
    ground_truth: Any
    data_source: str


@dataclass(frozen=True)
class StepReport:
    step: int  # the first is 1
    metrics: Mapping[str, float]  # as in metrics.jsonl; with those of the validation, if this step had one
    rows: Callable[[], list[dict[str, Any]]] = field(repr=False)

    @cached_property
    def answers(self) -> list[Answer]:
        """All answers of the step, in the order of the prompts. They are decoded when this is first read."""
        return [
            Answer(row["input"], row["output"], row["score"], row["reason"], row["gts"], row["data_source"])
            for row in self.rows()
        ]


Callback = Callable[[StepReport], bool | None]


def after_step(callbacks: Sequence[Callback]) -> AfterStep:
    """Call all of them. The run stops if one returns False or raises StopTraining."""

    def call(step: int, metrics: Mapping[str, float], rows: Callable[[], list[dict[str, Any]]]) -> bool:
        report = StepReport(step, metrics, rows)
        return all([goes_on(callback, report) for callback in callbacks])

    return call


def goes_on(callback: Callback, report: StepReport) -> bool:
    try:
        return callback(report) is not False
    except StopTraining:
        return False


TO_RESUME = 'To go on from the last checkpoint, call it again with the key "trainer.resume_mode": "auto".'


def train(
    config: Source = None,
    *,
    reward: Callable[..., Any] | None = None,
    train: Iterable[Any] | None = None,
    validation: Iterable[Any] | None = None,
    callbacks: Iterable[Callback] = (),
) -> TrainResult:
    """Train a policy. Without arguments: the embedded model on the embedded data.

    `config`: a mapping with dotted or nested keys, a list of "key=value" texts, the path of a YAML file, or a Config.
    `reward`: a function, called as `reward(data_source, solution_str, ground_truth, extra_info)`, or with lists as in
    TRL if it has a parameter `completions`. `train`, `validation`: rows with the columns of a data file, as a list of
    dicts, a datasets.Dataset or a pandas DataFrame. `callbacks`: called with a StepReport after each step; the run
    stops if one returns False or raises StopTraining.
    """
    checked, data = configured(config, train=train, validation=validation, reward=reward)
    try:
        with claimed(checked, data.content) as own:
            if own.uses_processes:
                fork_server(begins_run=True)
            return result_of(run(own, Caller(data, after_step(list(callbacks)))))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or getattr(error, "__notes__", []):  # a note names the checkpoint
            error.add_note(TO_RESUME)
        raise
