"""One run from beginning to end, of any kind of training: lock, compare, build, continue, train, restart."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from rloom.atomic import replace_text
from rloom.config.base import RunConfig, RunTrainer
from rloom.config.from_checkpoint import config_text
from rloom.console import announce
from rloom.doctor.run.live import LiveDiagnosis
from rloom.errors import WorkerError
from rloom.language import translate
from rloom.launch.directory import IDENTITY_FILE, last_of_this_run, run_directory, set_aside_later, starting_point
from rloom.launch.early_checks import layout_of
from rloom.launch.identity import Continuation, Record
from rloom.runs.run_folder import CONFIG_FILE, RunFolder, flat_config
from rloom.runs.runlog import RunLog
from rloom.runtime.nodes import check_head_address
from rloom.runtime.placement import WorkerLayout
from rloom.runtime.secret import new_secret, on_this_machine
from rloom.terminal import printable
from rloom.training.best import BestSettings, read_best
from rloom.training.checkpoint import Checkpoints, read_state
from rloom.training.steps import StepLoop, StepSettings

LOGS = "logs"


@dataclass(frozen=True)
class Outcome:
    directory: Path
    checkpoint: Path | None  # the last one; None: validation of a model that is not in a checkpoint
    stopped_early: bool = False  # by `after_step`, or because validations did not get better


class Job(Protocol):
    """A kind of training with its configuration. Inputs and parts are types of its own."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def keep(self) -> Mapping[str, int | None]:
        """Folders of a checkpoint, and how many of the newest to keep."""

    @property
    def only_reads(self) -> bool:
        """The run directory stays as it is."""

    @property
    def notices(self) -> Sequence[str]:
        """What was printed about the configuration; the log of the run keeps it."""

    def prepare(self) -> Any:
        """Check and read the inputs, before a model is loaded."""

    def identity(self, inputs: Any) -> Record: ...

    def compare(self, start: Path, identity: Record) -> Continuation: ...

    def open(self, layout: WorkerLayout, inputs: Any, identity: Record, logs: Path) -> AbstractContextManager[Any]:
        """The parts of the run, built; they have `settings.total_steps` and `stream`."""

    def train(
        self, parts: Any, log: RunLog, checkpoints: Checkpoints, start: Path | None, how: Continuation | None
    ) -> Outcome: ...


def run_with_restarts(job: Job) -> Outcome:
    """Go on from the last checkpoint when a worker is lost, as often as is allowed.

    The caller has locked the run directory: `claimed`.
    """
    config, directory = job.config, run_directory(job.config)
    with open_cluster_if_needed(config, directory):
        layout = layout_of(config)
        for restarts in count():
            try:
                return run_attempt(job, directory, layout, again=restarts > 0)
            except WorkerError as error:
                if not error.lost:
                    raise
                if restarts == config.trainer.max_restarts:
                    error.add_note(f"trainer.max_restarts={restarts}: the run does not begin again.")
                    raise
                restart = f"Restart {restarts + 1} of {config.trainer.max_restarts}"
                lines = [str(error), *getattr(error, "__notes__", []), restart]
                print(printable("\n".join(map(translate, lines))), flush=True)
                layout = remaining_layout(config, layout_of(config))  # machines may have joined, too
    raise AssertionError("unreachable")


def run_attempt(job: Job, directory: Path, layout: WorkerLayout, *, again: bool) -> Outcome:
    """Compared with what is there before a model is loaded."""
    config = job.config
    inputs = job.prepare()
    identity = job.identity(inputs)
    checkpoints = Checkpoints(directory, keep=job.keep)
    start = last_of_this_run(config, checkpoints) if again else starting_point(config, checkpoints)
    how = None if start is None else job.compare(start, identity)
    with job.open(layout, inputs, identity, directory / LOGS) as parts:
        if not job.only_reads:
            set_aside_later(checkpoints, start)
            replace_text(directory / CONFIG_FILE, config_text(config))
            replace_text(directory / IDENTITY_FILE, json.dumps(identity, indent=1))
        with RunLog.open(
            directory,
            loggers=config.trainer.loggers,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            config=config.model_dump(mode="json"),
            total_steps=parts.settings.total_steps,
            validate_every=parts.settings.validate_every,
            save_every=parts.settings.save_every,
            total_epochs=-(-parts.settings.total_steps // parts.stream.steps_per_epoch),
            resumed=start is not None,
            notices=job.notices,
        ) as log:
            return job.train(parts, log, checkpoints, start, how)


@contextmanager
def open_cluster_if_needed(config: RunConfig, directory: Path) -> Iterator[None]:
    if not config.uses_ray:
        yield
        return
    with ExitStack() as stack:
        if config.starts_a_cluster:
            check_head_address(config.trainer.head)
            stack.enter_context(new_secret(directory, config.trainer.head))
        elif not config.joins_a_cluster:
            stack.enter_context(on_this_machine())
        from rloom.launch.ray_cluster import open_cluster  # Ray is an extra

        stack.enter_context(open_cluster(config))
        yield


def remaining_layout(config: RunConfig, layout: WorkerLayout) -> WorkerLayout:
    if not config.uses_ray:
        return layout
    from rloom.launch.ray_cluster import shrink_layout

    return shrink_layout(config, layout)


def live_diagnosis(config: RunConfig, run_dir: Path | None = None) -> LiveDiagnosis | None:
    return LiveDiagnosis(flat_config(config.model_dump(mode="json")), run_dir) if config.trainer.diagnose else None


def best_settings(trainer: RunTrainer) -> BestSettings:
    lower = None if trainer.best_metric_mode is None else trainer.best_metric_mode == "min"
    return BestSettings(trainer.keep_best_checkpoint, trainer.best_metric_key, lower, trainer.early_stopping_patience)


def continue_from(loop: StepLoop, log: RunLog, start: Path | None, how: Continuation | None) -> None:
    if start is not None and how is not None:
        loop.resume(start, keep_position=how.keeps_position)
        own = start.resolve().parent == loop.checkpoints.directory.resolve()  # another run has other steps
        if loop.settings.best.is_on and own:
            loop.best = read_best(read_state(start), start)
        if loop.settings.best.keep:
            loop.checkpoints.point_to_best(loop.best.step if loop.best is not None else None)
        log.message(f"Going on from {start}")
        if how.notice:
            log.message(how.notice)


def timetable(settings: StepSettings, steps_per_epoch: int, *, validates: bool) -> str:
    """When checkpoints and validations are due. Guides also count them in epochs, so both are said."""

    def when(key: str, every: int | None, otherwise: str) -> str:
        if every is None:
            return f"{otherwise} ({key}=-1)"
        if every >= settings.total_steps:
            return f"at the end ({key}={every} steps)"
        return f"every {every} step{'s' * (every > 1)} and at the end ({key})"

    parts = [f"{steps_per_epoch} step{'s' * (steps_per_epoch != 1)} an epoch"]
    parts.append(f"checkpoint {when('trainer.save_freq', settings.save_every, 'only at the end')}")
    if validates:
        never = "only before the first step" if settings.validate_first else "never"
        parts.append(f"validation {when('trainer.test_freq', settings.validate_every, never)}")
    return "; ".join(parts)


def train_to_end(
    loop: StepLoop, log: RunLog, start: Path | None, *, opening: str, summary: Callable[[], Sequence[str]]
) -> Outcome:
    """`start`: the checkpoint that the loop continues from."""
    directory = loop.checkpoints.directory
    log.truncate_after(loop.state.step if start is not None else -1)
    if loop.ended:
        log.message(
            f"This run has already ended, at step {loop.state.step}. Train on with a larger "
            "trainer.total_training_steps, or begin again with trainer.resume_mode=disable"
        )
        return Outcome(directory, start)
    if loop.out_of_patience:
        log.message(
            f"This run has stopped early, at step {loop.state.step}. Train on with a larger "
            "trainer.early_stopping_patience, or begin again with trainer.resume_mode=disable"
        )
        return Outcome(directory, start, stopped_early=True)
    if start is not None:
        loop.add_history(RunFolder(directory).metrics)
    announce("Starting training ...")
    log.message(opening)
    try:
        loop.run()
    except KeyboardInterrupt as interrupt:
        interrupt.args = interrupt.args or (loop.last_checkpoint(),)
        log.message(*interrupt.args)
        raise
    for line in summary():
        log.message(line)
    last = loop.checkpoints.path(loop.state.step)  # the last step is always saved
    return Outcome(directory, last, stopped_early=not loop.ended)
