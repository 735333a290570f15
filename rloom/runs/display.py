"""Terminal output of a run: a progress bar for each stage of the current step, and one line for each finished step.

Only a terminal gets bars, colours and folded lines; other outputs (a file, CI) get plain lines.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from rloom.language import translate
from rloom.runs.names import step_line
from rloom.terminal import printable

SEPARATOR = " · "
INDENT = "    "

# Stages with a progress bar, and their labels.
STAGE_LABELS = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "old_log_prob",
    "ref": "ref",
    "values": "compute_values",
    "update_critic": "train_critic",
    "update_actor": "train_actor",
    "update_sft": "train",
    "testing": "validation",
}

SECONDS = ("timing_s/step", "perf/time_per_step")


class LinePart(NamedTuple):
    """`reward_mean 0.531`"""

    name: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value}".strip()


class Display:
    def __init__(
        self,
        console: Console | None = None,
        *,
        total_steps: int | None = None,
        total_epochs: int | None = None,
        quiet: bool = False,
    ) -> None:
        self._console = console if console is not None else Console(quiet=quiet)
        self._total_steps, self._total_epochs = total_steps, total_epochs
        self._has_bars = self._console.is_interactive and not self._console.quiet
        self._progress: Progress | None = None  # the bars of the current step
        self._bars: dict[str, TaskID] = {}

    def begin(self, stage: str) -> None:
        """Show a bar for the stage, pulsing until its size is known."""
        if not self._has_bars or stage not in STAGE_LABELS or stage in self._bars:
            return
        if self._progress is None:
            self._progress = _bars(self._console)
            self._progress.start()
        self._bars[stage] = self._progress.add_task(STAGE_LABELS[stage], total=None)

    def advance(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None and stage in self._bars:
            self._progress.update(self._bars[stage], completed=done, total=total)

    def end(self, stage: str) -> None:
        """Fill the bar. It stays until the step's line replaces all bars."""
        if self._progress is None or stage not in self._bars:
            return
        bar = self._progress.tasks[self._progress.task_ids.index(self._bars[stage])]
        size = bar.total if bar.total is not None else 1
        self._progress.update(bar.id, completed=size, total=size)

    def clear(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._bars = {}

    def message(self, text: str) -> None:
        self.quote(translate(text))

    def quote(self, text: str) -> None:
        """A line with words of a model or of data, which no translation may change."""
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.clear()
        self._print(step_parts(step, self._total_steps, metrics, self._total_epochs))

    def validation(
        self, step: int, metrics: Mapping[str, float], first: Mapping[str, tuple[int, float]], word: str = "accuracy"
    ) -> None:
        self.clear()
        self._print(validation_parts(step, metrics, first, word))

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
        parts.append(LinePart(label, f"{value:.3f}" if label == "reward_mean" else _short(value)))
    failed = metrics.get("reward/failed", 0)
    if failed > 0:
        parts.append(LinePart("failed", str(round(failed))))
    seconds = _first(SECONDS, metrics)
    if seconds is not None:
        parts.append(LinePart(f"{seconds:,.1f} s"))
    return parts


def validation_parts(
    step: int, metrics: Mapping[str, float], first: Mapping[str, tuple[int, float]], word: str = "accuracy"
) -> list[LinePart]:
    """`first`: (step, accuracy) of the run's first validation, which may be later than step 0. `word`: accuracy, or
    score, of which the mean is shown as it is."""
    label, show = ("acc", _percent) if word == "accuracy" else (word, _short)
    parts = [LinePart("step", str(step)), LinePart("validation")]
    for name, key in (("loss", "val/loss"), ("perplexity", "val/perplexity")):
        if key in metrics:
            parts.append(LinePart(name, _short(metrics[key])))
    for name, value in validation_accuracies(metrics).items():
        since = ""
        if name in first:
            when, before = first[name]
            since = f" ({'start' if when == 0 else f'step {when}'} {show(before)})"
        parts.append(LinePart(f"{name} {label}", show(value) + since))
    return parts


def validation_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """{'val-core/openai/gsm8k/acc/mean@1': 0.4} -> {'openai/gsm8k': 0.4}"""
    return {
        name.removeprefix("val-core/").rpartition("/acc/mean@")[0]: value
        for name, value in metrics.items()
        if name.startswith("val-core/") and "/acc/mean@" in name
    }


def _first(names: tuple[str, ...], metrics: Mapping[str, float]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def _short(value: float) -> str:
    """Three significant digits: 0.0213, 17.2; or a whole number: 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(accuracy: float) -> str:
    # scores of a reward model are not bounded, and are not shown as a percentage
    return f"{100 * accuracy:.1f} %" if 0 <= accuracy <= 1 else _short(accuracy)


def _folded(parts: list[LinePart], width: int | None) -> list[list[LinePart]]:
    """Break the lines of a terminal between two parts, never inside one."""
    lines: list[list[LinePart]] = [[]]
    for part in parts:
        line = INDENT + SEPARATOR.join(map(str, [*lines[-1], part]))
        if width is not None and lines[-1] and len(line) > width:
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


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("  {task.description}", table_column=Column(width=16, no_wrap=True)),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
