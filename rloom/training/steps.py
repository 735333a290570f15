"""What a training loop does around its steps: validation and checkpoints where due, ctrl-C, saving after an error."""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from rloom.algos.objectives import Metrics
from rloom.data.stream import EndOfData
from rloom.doctor.run.live import LiveDiagnosis, live_message
from rloom.errors import CheckpointError, RloomError, TrainingError, WorkerError
from rloom.interrupts import deferred_interrupt
from rloom.language import translate
from rloom.runs.runlog import RunLog
from rloom.runtime.group import Group
from rloom.training.best import MEAN, Best, BestSettings
from rloom.training.checkpoint import Checkpoints, Saving, Writing, do_nothing
from rloom.training.memory import explain_out_of_memory

MODELS = {"actor": "the policy", "critic": "the critic", "train": "the model"}  # by the prefix of their metrics
Rows = Callable[[], list[dict[str, Any]]]
WriteCheckpoint = Callable[[Path, bool], Writing | None]  # (folder, whether in the background)
AfterStep = Callable[[int, Metrics, Rows], bool]  # (step, its metrics, its answers) -> whether to go on


def always_continue(step: int, metrics: Metrics, rows: Rows) -> bool:
    return True


@dataclass(frozen=True)
class CompletedStep:
    metrics: Metrics
    rows: Rows = list  # its answers, as they are dumped


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The part of the configuration that every loop uses."""

    total_steps: int
    save_every: int | None
    validate_every: int | None
    validate_first: bool
    best: BestSettings
    device: torch.device
    devices: int  # of all workers
    peak_flops: float | None  # of all devices together, where it is known


class StepState(Protocol):
    """What a checkpoint holds beside weights and optimizer moments."""

    @property
    def step(self) -> int: ...


class StepLoop(ABC):
    """A loop sets `state` and `updates_at_state` when a step is complete."""

    def __init__(
        self,
        settings: StepSettings,
        state: StepState,
        log: RunLog,
        checkpoints: Checkpoints,
        write_checkpoint: WriteCheckpoint,
        after_step: AfterStep = always_continue,
        diagnosis: LiveDiagnosis | None = None,  # None: no warnings about the course of the run
    ) -> None:
        self.settings, self.state, self.log = settings, state, log
        self.checkpoints, self.write_checkpoint = checkpoints, write_checkpoint
        self.after_step, self.diagnosis = after_step, diagnosis
        self.saving: Saving | None = None  # the checkpoint that is being written
        self.interrupted = False  # by a signal
        self.terminated = False  # by SIGTERM
        self.saves_at_once = False  # at SIGTERM
        self.stopped = False  # by `after_step`, or because validations do not get better
        self.validated: set[str] = set()  # names of the metrics of earlier validations
        self.best: Best | None = None  # None: there was no validation yet, or none is chosen
        self.data_ended = False  # before `total_steps`, since a step may take several batches
        self.first_step = state.step + 1  # of this process
        self.updates_at_state = 0  # optimizer steps when `state` was set: with more, the weights are between two steps

    @abstractmethod
    def train_step(self, step: int) -> CompletedStep:
        """One step, logged."""

    @abstractmethod
    def validate(self, step: int) -> Metrics: ...

    @abstractmethod
    def saved_state(self) -> dict[str, Any]:
        """`state` as JSON."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Optimizer steps begun."""

    @abstractmethod
    def resume(self, checkpoint: Path, *, keep_position: bool = True) -> None:
        """From a checkpoint that was checked. `keep_position`: whether to continue in the data where it stopped."""

    def run(self) -> None:
        if self.settings.validate_first and self.state.step == 0:
            first = self.validate(0)
            if self.settings.best.is_on:
                self.settings.best.value(first)  # a metric that does not exist is an error before the first step
            self.add_history([{**first, "step": 0}])
        self.first_step = self.state.step + 1
        with deferred_interrupt(self.interrupt):
            with suppress(KeyboardInterrupt):
                while not self.ended and not self.interrupted and not self.stopped:
                    self.take_step(self.state.step + 1)
                if not self.interrupted or self.ended:
                    return
            raise KeyboardInterrupt(self.save_last_step())

    @property
    def ended(self) -> bool:
        return self.data_ended or self.state.step >= self.settings.total_steps

    def interrupt(self, number: int) -> None:
        """After ctrl-C the step is completed first. A scheduler kills a run some time after SIGTERM, which may be
        shorter than a step: without an update yet, the step is left out. Its answers are generated again, the same
        ones, by the run that goes on."""
        self.interrupted = True
        if number == signal.SIGINT:
            self.log.message("Stopping: this step is finished and saved first. Once more stops at once.")
            return
        self.log.message("SIGTERM: stopping. The last step is saved, and this one too if its update has begun.")
        self.terminated = True
        if self.saves_at_once:
            raise KeyboardInterrupt

    @contextmanager
    def can_stop(self) -> Iterator[None]:
        """What may take long and changes no weights. SIGTERM, also an earlier one, ends it."""
        self.saves_at_once = True
        try:
            if self.terminated:
                raise KeyboardInterrupt
            yield
        finally:
            self.saves_at_once = False

    def take_step(self, step: int) -> None:
        """One step, then validation and a checkpoint where due. After an error, the last step is saved if possible."""
        last = step == self.settings.total_steps
        self.log.begin_step(step)
        try:
            self.check_saving()
            try:
                completed = self.train_step(step)
            except EndOfData:
                self.end_with_the_data()
                return
            metrics = completed.metrics
            former = self.best
            if is_due(self.settings.validate_every, step, last):
                found = self.validate(step)
                metrics = metrics | found
                self.compare_with_best(step, found)
            self.warn_of_skipped_updates(step, metrics)
            self.warn_of_faults(step, metrics)
            self.save_if_due(step, former, last=last)
            self.stopped = not self.after_step(step, metrics, completed.rows) or self.out_of_patience
            if self.stopped:
                self.save()
        except Exception as error:
            error.add_note(self.save_after(error))
            raise

    def compare_with_best(self, step: int, metrics: Metrics) -> None:
        settings, best = self.settings.best, self.best
        value = settings.value(metrics, self.validated) if settings.is_on else None
        self.validated |= metrics.keys()
        if value is None:
            return
        if best is None or settings.is_better(value, best.value, metrics):
            self.best = Best(step, value)
            return
        self.best = replace(best, validations_since=best.validations_since + 1)
        if self.out_of_patience:
            self.log.message(
                f"Stopping early: {settings.metric or MEAN} is {value:.4g} and was {best.value:.4g} at step "
                f"{best.step}; {self.best.validations_since} validations without a better one "
                "(trainer.early_stopping_patience)"
            )

    def save_if_due(self, step: int, former: Best | None, *, last: bool) -> None:
        """`former`: the best validation before this step."""
        is_best = self.settings.best.keep and self.best is not None and self.best.step == step
        if last or is_best or is_due(self.settings.save_every, step, last):
            self.save(background=not last, after=partial(self.keep_best, step, former) if is_best else do_nothing)
        if is_best:
            self.log.message(f"The best validation so far: {self.checkpoints.path(step).name}")

    def keep_best(self, step: int, former: Best | None) -> None:
        """When the checkpoint of the best validation is complete, that of the one before it goes, unless it was due."""
        self.checkpoints.point_to_best(step)
        if former is not None and not is_due(self.settings.save_every, former.step, last=False):
            self.checkpoints.discard(former.step)

    @property
    def out_of_patience(self) -> bool:
        patience = self.settings.best.patience
        return patience is not None and self.best is not None and self.best.validations_since >= patience

    def end_with_the_data(self) -> None:
        """The data ended before a step was filled, which is left out like rows that do not fill a batch."""
        self.data_ended, last = True, self.state.step
        if last == 0:
            raise TrainingError(
                "the data of trainer.total_epochs ended before one step was filled with groups that "
                "algorithm.filter_groups keeps. Too easy or too hard for this model: change the data, raise "
                "actor_rollout_ref.rollout.n or trainer.total_epochs"
            )
        self.log.message(f"The data ended before step {last + 1} was filled: step {last} was the last")
        every = self.settings.validate_every
        former = self.best
        if last >= self.first_step and every is not None and not is_due(every, last, last=False):
            self.compare_with_best(last, self.validate(last))
        self.save_if_due(last, former, last=True)

    def add_history(self, records: Iterable[Mapping[str, float]]) -> None:
        """What was measured before the first step of this process; with "step"."""
        records = list(records)
        self.validated |= {name for record in records for name in record if name.startswith("val")}
        if self.diagnosis is not None:
            self.diagnosis.add_history(records)

    def warn_of_skipped_updates(self, step: int, metrics: Metrics) -> None:
        """Weights that stay as they were look like a run that does not learn."""
        for name, count in metrics.items():
            model, _, metric = name.rpartition("/")
            if metric == "nonfinite_updates" and count:
                which = f"{count:g} update{'s' * (count != 1)} of {MODELS.get(model, model)}"
                self.log.warning(
                    f"Step {step}: {which} skipped, because the gradient was not finite. The weights stay as they "
                    "were; look at the rewards and the learning rate.",
                    kind="nonfinite_updates",
                    metric=name,
                    value=count,
                )

    def warn_of_faults(self, step: int, metrics: Metrics) -> None:
        if self.diagnosis is None:
            return
        try:
            found = self.diagnosis.check(step, metrics)
        except Exception as error:  # a check that fails does not end the run
            self.diagnosis = None
            self.log.warning(f"The checks of this run are off: {type(error).__name__}: {error}", kind="diagnosis")
            return
        for finding in found:
            message, shown = (live_message(finding, self.log.run_dir, to) for to in (str, translate))
            self.log.warning(message, shown=shown, kind=f"diagnosis/{finding.kind}", finding=finding.as_json())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A timed part of a step that uses GPUs."""
        changes_weights = name.startswith("update")
        with self.log.span(name), explain_out_of_memory(name), nullcontext() if changes_weights else self.can_stop():
            yield

    def save_after(self, error: Exception) -> str:
        """Save the last completed step after an error, if possible. Returns what the user is told."""
        if isinstance(error, CheckpointError):  # saving has failed
            self.settle()
            return self.last_checkpoint()
        if isinstance(error, WorkerError) or (isinstance(error, RloomError) and error.worker is not None):
            # saving is collective: the other workers would wait for the failed one
            self.settle()
            return f"A worker failed, so nothing was saved after it. {self.last_checkpoint()}"
        try:
            return self.save_last_step()
        except Exception as failure:  # shown after the error that came first
            return f"Saving failed as well: {type(failure).__name__}: {failure}\n{self.last_checkpoint()}"

    def save_last_step(self) -> str:
        """Save the last completed step, unless an update has begun since."""
        if self.state.step == 0:
            return "No step was completed, so there is nothing to save."
        if self.updates != self.updates_at_state:
            self.settle()
            return f"Stopped in the middle of an update. {self.last_checkpoint()}"
        return f"Stopped after step {self.state.step}, saved in {self.save()}. The same command goes on from there."

    def last_checkpoint(self) -> str:
        steps = self.checkpoints.steps()
        if not steps:
            return "No checkpoint was saved yet."
        return f"The last good checkpoint is {self.checkpoints.path(steps[-1])}; the same command goes on from it."

    def save(self, *, background: bool = False, after: Callable[[], None] = do_nothing) -> Path:
        """The checkpoint of the last completed step. In the background it is complete after this returns, and `after`
        is called then. The one before it is always waited for: one is in host memory at a time."""
        path = self.checkpoints.path(self.state.step)
        with self.log.span("save_checkpoint"):
            self.finish_saving()
            if path.exists():
                after()
                return path
            state = self.saved_state() | ({"best": self.best.saved()} if self.best is not None else {})
            kept = self.best.step if self.best is not None and self.settings.best.keep else None
            self.saving = self.checkpoints.begin(
                self.state.step, partial(self.write, background=background), state, best=kept, after=after
            )
            if not background:
                self.finish_saving()
        return path

    def finish_saving(self) -> None:
        if self.saving is not None:
            self.saving.finish()
            self.saving = None

    def check_saving(self) -> None:
        """What stopped the save of an earlier step ends the run here."""
        if self.saving is not None:
            self.saving.check()
            if self.saving.is_over:
                self.finish_saving()

    def settle(self) -> None:
        """After an error, the checkpoint that is being written is completed if its writers can."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.settle()

    def write(self, folder: Path, background: bool) -> Writing | None:
        """The folders and files of a checkpoint, beside `saved_state`."""
        return self.write_checkpoint(folder, background)


def worker_metrics(workers: Group) -> Metrics:
    """What the workers report of their processes; of a metric that several report, the largest."""
    reports: list[Metrics] = workers.call("stats")
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: max(report[name] for report in reports if name in report) for name in names}


def is_due(every: int | None, step: int, last: bool) -> bool:
    return every is not None and (last or step % every == 0)
