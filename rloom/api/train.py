"""`rloom.train`: one run, called from Python."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from inspect import signature
from pathlib import Path
from typing import Any, Never

from rloom.api.arguments import Given, Rows, configured
from rloom.api.config import ShortKeys, Source
from rloom.api.episodes import EnvironmentArgument
from rloom.api.rewards import RewardArgument, ZeroScores
from rloom.errors import ConfigError
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
        accuracies = validation_accuracies(self.validation)
        return {
            "steps": f"{self.steps}{' (stopped early)' if self.stopped_early else ''}",
            **{f"validation on {name}": f"{value:.3g}" for name, value in accuracies.items()},
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


def after_step(callbacks: Sequence[Callback], zeros: ZeroScores | None = None) -> AfterStep:
    """Call all of them. The run stops if one returns False or raises StopTraining."""
    unchecked = [zeros] if zeros is not None else []

    def call(step: int, metrics: Mapping[str, float], rows: Callable[[], list[dict[str, Any]]]) -> bool:
        while unchecked:  # in the first step
            unchecked.pop().check(metrics)
        report = StepReport(step, metrics, rows)
        return all([goes_on(callback, report) for callback in callbacks])

    return call


def goes_on(callback: Callback, report: StepReport) -> bool:
    try:
        return callback(report) is not False
    except StopTraining:
        return False


def checked_callbacks(callbacks: Any) -> list[Callback]:
    """Before a model is loaded."""
    if callable(callbacks):
        raise ConfigError(f"callbacks is {name_of(callbacks)}; give a list: callbacks=[{name_of(callbacks)}]")
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str | bytes | Mapping):
        raise ConfigError(f"callbacks is {callbacks!r}; give a list of functions of one StepReport")
    found = list(callbacks)
    for callback in found:
        if not callable(callback):
            raise ConfigError(f"callbacks has {callback!r}, which is no function; a callback takes one StepReport")
        try:
            signature(callback).bind(None)
        except TypeError as error:
            raise ConfigError(f"callbacks: {name_of(callback)} takes one argument, a StepReport: {error}") from error
        except ValueError:  # built-in functions may have no signature
            continue
    return found


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


TO_RESUME = 'To go on from the last checkpoint, call it again with the key "trainer.resume_mode": "auto".'


def train(
    config: Source = None,
    *,
    model: str | Path | None = None,
    algorithm: str | None = None,
    reward: RewardArgument | None = None,
    reward_weights: Sequence[float] | None = None,
    train: Rows | None = None,
    validation: Rows | None = None,
    environment: EnvironmentArgument | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    lr: float | None = None,
    critic_lr: float | None = None,
    n: int | None = None,
    batch: int | None = None,
    mini_batch: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    temperature: float | None = None,
    kl_coef: float | None = None,
    kl_loss_coef: float | None = None,
    clip_ratio: float | None = None,
    entropy_coeff: float | None = None,
    lora_rank: int | None = None,
    rollout: str | None = None,
    trainer_mode: str | None = None,
    n_gpus: int | None = None,
    seed: int | None = None,
    save_freq: int | None = None,
    test_freq: int | None = None,
    output_dir: str | Path | None = None,
    callbacks: Iterable[Callback] = (),
    args: Any = None,
    **unknown: Never,
) -> TrainResult:
    """Train a policy. Without arguments: the embedded model on the embedded data.

    `model`: folder or hub name. `algorithm`: gae (PPO), grpo, rloo, ... `reward`: a function, called as
    `reward(data_source, solution_str, ground_truth, extra_info)`, or with lists as in TRL if it has a parameter
    `completions`; the name of a reward model or a rule; or a list of them, whose sum by `reward_weights` is the score.
    `train`, `validation`: rows as a list of dicts, a datasets.Dataset or a pandas DataFrame, or names of files.
    `environment`: for several turns, a class whose public methods are tools, or one with `step`; several by name; or
    the name of one of rloom's. `tools`: functions that the policy calls. Both run in processes of their own.
    `lr` ... `output_dir`: keys by their short names; docs/python.md has the table. `config`: all other keys: a mapping
    with dotted or nested keys, a list of "key=value" texts, the path of a YAML file, or a Config. `callbacks`: called
    with a StepReport after each step; the run stops if one returns False or raises StopTraining. `args`: TRL's
    GRPOConfig or RLOOConfig, or a dict of its fields; other arguments override it.
    """
    given = {name: value for name, value in locals().items() if name in ShortKeys.__annotations__} | unknown
    return trained(config, Given(train, validation, reward, reward_weights, args, environment, tools), given, callbacks)


def trained(source: Source, given: Given, short: Mapping[str, Any], callbacks: Iterable[Callback]) -> TrainResult:
    called = checked_callbacks(callbacks)
    checked, data, zeros = configured(source, given, short, "train")
    try:
        with claimed(checked, data.content) as own:
            if own.uses_processes:
                fork_server(begins_run=True)
            return result_of(run(own, Caller(data, after_step(called, zeros))))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or getattr(error, "__notes__", []):  # a note names the checkpoint
            error.add_note(TO_RESUME)
        raise
