"""Terminal output of a run: bars of the run and of each stage of the current step, one line for each finished step.

Only a terminal gets bars, colours and folded lines; other outputs (a file, CI) get plain lines, and one about the stage
under way every 30 seconds.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from rloom.language import translate
from rloom.runs.measures import LABELS, short_number, shown, validation_accuracies
from rloom.runs.names import step_line
from rloom.runs.remaining import SAVE, STEP, VALIDATION, RemainingTime, Schedule, clock_time
from rloom.terminal import INDENT, columns, folded, printable

SEPARATOR = " · "
PROGRESS_LINE_S = 30.0
STOP_S = 1.0

# Stages with a progress bar, and their labels.
STAGE_LABELS = {
    "gen": "rollout",
    "gen_greedy": "rollout_greedy",
    "reward": "reward",
    "probe": "probe",
    "old_log_prob": "old_log_prob",
    "ref": "ref",
    "values": "compute_values",
    "update_critic": "train_critic",
    "update_actor": "train_actor",
    "update_sft": "train",
    "update_weights": "sync_weights",
    VALIDATION: "validation",
    SAVE: "save",
}

SECONDS = ("timing_s/step", "perf/time_per_step")


class LinePart(NamedTuple):
    """`reward_mean 0.531`"""

    name: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value}".strip()


class ShownStage:
    """A stage under way, or one that has ended in this step."""

    def __init__(self, begun: float) -> None:
        self.begun, self.done, self.total = begun, 0, 0  # total 0: of unknown size
        self.bar: TaskID | None = None  # iff there are bars

    @property
    def count(self) -> str:
        return f"{self.done}/{self.total}" if self.total else ""


class Display:
    def __init__(
        self,
        console: Console | None = None,
        *,
        total_steps: int | None = None,
        total_epochs: int | None = None,
        validate_every: int | None = None,
        save_every: int | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console if console is not None else Console(quiet=quiet)
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._clock, self._began = clock, clock()
        self.remaining = RemainingTime(Schedule(total_steps or 0, validate_every, save_every), clock)
        self._has_bars = self._console.is_interactive and not self._console.quiet
        self._progress: Progress | None = None  # the bars of the current step
        self._stages: dict[str, ShownStage] = {}  # those of STAGE_LABELS
        self._running: list[str] = []  # the last one is the innermost
        self._lines = ProgressLines(self.report) if not (self._has_bars or self._console.quiet) else None

    def begin_step(self, step: int) -> None:
        self.clear()
        self.remaining.begin_step(step)

    def begin(self, stage: str) -> None:
        """Show a bar for the stage, pulsing until its size is known."""
        if stage in (VALIDATION, SAVE):
            self.remaining.begin(stage)
        if stage not in STAGE_LABELS or stage in self._running:
            return
        self._running.append(stage)
        found = self._stages.setdefault(stage, ShownStage(self._clock()))
        if self._lines is not None:
            self._lines.start()
        if self._has_bars and found.bar is None:
            found.bar = self._shown_bars().add_task(STAGE_LABELS[stage], total=None, text="")

    def advance(self, stage: str, done: int, total: int) -> None:
        if (found := self._stages.get(stage)) is None:
            return
        found.done, found.total = done, total
        if self._progress is not None and found.bar is not None:
            self._progress.update(found.bar, completed=done, total=total, text=found.count)

    def end(self, stage: str) -> None:
        """Fill the bar. It stays until the step's line replaces all bars."""
        if stage in (VALIDATION, SAVE):
            self.remaining.end(stage)
        if stage not in self._running:
            return
        self._running.remove(stage)
        found = self._stages[stage]
        if self._progress is not None and found.bar is not None:
            found.done, size = found.total, found.total or 1
            self._progress.update(found.bar, completed=size, total=size, text=found.count)

    def _shown_bars(self) -> Progress:
        if self._progress is None:
            self._progress = _bars(self._console, self._clock)
            if self._total_steps:
                done = self.remaining.done[STEP]
                shown = f"step {min(done + 1, self._total_steps)}/{self._total_steps}"
                left = TimeLeft(self.remaining)
                self._progress.add_task(shown, completed=done, total=self._total_steps, text=left)
                self._progress.tasks[0].start_time = self._began
            self._progress.start()
        return self._progress

    def report(self) -> None:
        """A line about the stage under way, where there are no bars."""
        running = self._running[-1:]
        found = self._stages.get(running[0]) if running else None
        if found is None:  # of a thread: a stage may end meanwhile
            return
        parts = [LinePart("step", f"{self.remaining.step}/{self._total_steps}")] if self._total_steps else []
        parts.append(LinePart(STAGE_LABELS[running[0]], found.count))
        parts.append(LinePart(clock_time(self._clock() - found.begun)))
        parts += [LinePart(left)] if (left := str(TimeLeft(self.remaining))) else []
        self._print(parts)

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._stages = {name: ShownStage(self._clock()) for name in self._running}

    def close(self) -> None:
        self.clear()
        if self._lines is not None:
            self._lines.stop()

    def message(self, text: str) -> None:
        self.quote(translate(text))

    def quote(self, text: str) -> None:
        """A line with words of a model or of data, which no translation may change."""
        shown = printable(text)
        if self._console.is_terminal:
            shown = folded(shown, self._console.width)
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.clear()
        self.remaining.complete_step()
        self._print(step_parts(step, self._total_steps, metrics, self._total_epochs))

    def validation(
        self,
        step: int,
        metrics: Mapping[str, float],
        first: Mapping[str, tuple[int, float]],
        measures: Mapping[str, str],
    ) -> None:
        self.clear()
        self._print(validation_parts(step, metrics, first, measures))

    def _print(self, parts: list[LinePart]) -> None:
        width = self._console.width if self._console.is_terminal else None
        self._console.print(_styled(_folded(parts, width)), soft_wrap=True)


def step_parts(
    step: int, total_steps: int | None, metrics: Mapping[str, float], total_epochs: int | None = None
) -> list[LinePart]:
    parts = [LinePart("step", f"{step}/{total_steps}" if total_steps is not None else str(step))]
    if "training/epoch" in metrics:
        epoch = int(metrics["training/epoch"]) + 1
        # dynamic sampling takes more prompts than planned, and may pass the last epoch
        of_all = f"/{total_epochs}" if total_epochs is not None and epoch <= total_epochs else ""
        parts.append(LinePart("epoch", f"{epoch}{of_all}"))
    for label, value in step_line(metrics).items():
        parts.append(LinePart(label, f"{value:.3f}" if label == "reward_mean" else short_number(value)))
    failed = metrics.get("reward/failed", 0)
    if failed > 0:
        parts.append(LinePart("failed", str(round(failed))))
    seconds = next((metrics[name] for name in SECONDS if name in metrics), None)
    if seconds is not None:
        parts.append(LinePart(f"{seconds:,.1f} s"))
    return parts


def validation_parts(
    step: int,
    metrics: Mapping[str, float],
    first: Mapping[str, tuple[int, float]],
    measures: Mapping[str, str],
) -> list[LinePart]:
    """`first`: (step, value) of the run's first validation, which may be later than step 0. `measures`: accuracy or
    score, by data source."""
    parts = [LinePart("step", str(step)), LinePart("validation")]
    for name, key in (("loss", "val/loss"), ("perplexity", "val/perplexity")):
        if key in metrics:
            parts.append(LinePart(name, short_number(metrics[key])))
    for name, value in validation_accuracies(metrics).items():
        measure, since = measures[name], ""
        if name in first:
            when, before = first[name]
            since = f" ({'start' if when == 0 else f'step {when}'} {shown(before, measure)})"
        parts.append(LinePart(f"{name} {LABELS[measure]}", shown(value, measure) + since))
    return parts


def _folded(parts: list[LinePart], width: int | None) -> list[list[LinePart]]:
    """Break the lines of a terminal between two parts, never inside one."""
    lines: list[list[LinePart]] = [[]]
    for part in parts:
        line = INDENT + SEPARATOR.join(map(str, [*lines[-1], part]))
        if width is not None and lines[-1] and columns(line) > width:
            lines.append([])
        lines[-1].append(part)
    return lines


def _styled(lines: list[list[LinePart]]) -> Text:
    text = Text()
    for number, line in enumerate(lines):
        text.append("\n" + INDENT if number else "")
        for place, part in enumerate(line):
            text.append(SEPARATOR if place else "", style="dim")
            text.append(printable(part.name), style="bold" if part.name == "step" else "cyan" if part.value else "dim")
            text.append(f" {part.value}" if part.value else "", style="bold" if part.name == "step" else "")
    return text


class TimeLeft:
    """Text that is made again whenever the bars are drawn; empty as long as the time is unknown."""

    def __init__(self, remaining: RemainingTime) -> None:
        self._remaining = remaining

    def __str__(self) -> str:
        left = self._remaining.left_s()
        return "" if left is None else translate(f"about {clock_time(left)} left")


class ProgressLines:
    """A thread that reports at regular times until it is stopped."""

    def __init__(self, report: Callable[[], None], every_s: float = PROGRESS_LINE_S) -> None:
        self._report, self._every_s = report, every_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="progress-lines", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """A line that is being written is finished first, unless nobody reads it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            with suppress(OSError):  # nobody reads standard output any more: the run's own lines end it
                self._report()


def _bars(console: Console, clock: Callable[[], float]) -> Progress:
    return Progress(
        TextColumn("  {task.description}", table_column=Column(width=18, no_wrap=True)),
        BarColumn(bar_width=26),
        TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        get_time=clock,
        refresh_per_second=4,  # 10, the default, takes 3 % of a core
    )
