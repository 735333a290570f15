"""The log of a run: metrics, the time of each stage, events. It writes the log files of the run directory."""

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rloom.language import translate
from rloom.runs.display import Display
from rloom.runs.measures import ACCURACY, measured, validation_accuracies
from rloom.runs.names import with_aliases
from rloom.runs.provenance import NOTICE, start_record
from rloom.runs.records import EVENTS_FILE, METRICS_FILE, EventLog, read_metrics, truncate_metrics, write_rows
from rloom.runs.run_folder import accuracy_curves
from rloom.runs.trackers import make_trackers
from rloom.runs.trackers.base import Start, Tracker, cell
from rloom.types import Score

VALIDATION_ANSWERS = "val/generations"  # the name of the table in the trackers, as in verl


class RunLog:
    """Example:

    with RunLog.open(run_dir, loggers=["console"], project="p", experiment="e", config={}) as log:
        with log.span("gen"):
            log.advance(64, 128)
        log.step(1, {"critic/score/mean": 0.5})  # -> metrics.jsonl, with timing_s/gen, and a line on the console
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        trackers: Sequence[Tracker],
        display: Display,
        total_steps: int | None = None,
        notices: Sequence[str] = (),  # printed before the log was opened
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.run_dir = run_dir
        self._total_steps, self._notices = total_steps, notices
        self._trackers = trackers
        self._display = display
        self._clock = clock
        self.events = EventLog(run_dir / EVENTS_FILE)
        self._step = 0  # the step under way
        self._open_spans: list[str] = []
        self._seconds: dict[str, float] = {}  # by span, since they were last logged
        self._first_accuracies = _first_accuracies(read_metrics(self.metrics_file))  # and the step of each
        self._has_shown_rewards = False

    @classmethod
    def open(
        cls,
        run_dir: Path,
        *,
        loggers: Sequence[str],
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        total_steps: int | None = None,
        total_epochs: int | None = None,
        validate_every: int | None = None,
        save_every: int | None = None,
        resumed: bool = False,
        notices: Sequence[str] = (),
    ) -> Self:
        """`resumed`: whether the run continues from a checkpoint; trackers then continue its curves."""
        display = Display(
            total_steps=total_steps,
            total_epochs=total_epochs,
            validate_every=validate_every,
            save_every=save_every,
            quiet="console" not in loggers,
        )
        start = Start(run_dir, project, experiment, config, resumed, report=display.message)
        trackers = make_trackers(loggers, start)
        return cls(run_dir, trackers=trackers, display=display, total_steps=total_steps, notices=notices)

    @property
    def metrics_file(self) -> Path:
        return self.run_dir / METRICS_FILE

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a stage into `timing_s/{name}`. Within a step, spans of one name add up; nested, the outer counts."""
        self._open_spans.append(name)
        self._display.begin(name)
        self.events.write("stage_begin", step=self._step, stage=name)
        started = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - started
            self._open_spans.pop()
            self.events.write("stage_end", step=self._step, stage=name, seconds=elapsed)
            if name not in self._open_spans:
                self._seconds[name] = self._seconds.get(name, 0.0) + elapsed
                self._display.end(name)

    def begin_step(self, step: int) -> None:
        """Events from here on are those of this step."""
        self._step = step
        self._display.begin_step(step)

    def seconds(self, name: str) -> float:
        """What spans of this name took since they were last logged."""
        return self._seconds.get(name, 0.0)

    def advance(self, done: int, total: int) -> None:
        """Move the bar of the current stage."""
        if self._open_spans:
            self._display.advance(self._open_spans[-1], done, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Log what a step measured and took. Returns both."""
        timed = {**metrics, **_timings(self._seconds)}
        self._seconds = {}
        self._log(step, timed)
        self.events.write("step", step=step, metrics=timed)
        self._display.step(step, timed)
        return timed

    def validation(self, step: int, metrics: Mapping[str, float], measures: Mapping[str, str]) -> None:
        """Log a validation, and its time alone: the rest of the time belongs to the step. `measures`: accuracy or
        score, by data source."""
        testing = {"testing": self._seconds.pop("testing")} if "testing" in self._seconds else {}
        timed = {**metrics, **_timings(testing)}
        self._log(step, timed)
        self.events.write("validation", step=step, metrics=timed, measures=measures)
        accuracies = {name: (step, value) for name, value in validation_accuracies(metrics).items()}
        self._display.validation(step, metrics, self._first_accuracies, measures)
        self._first_accuracies = {**accuracies, **self._first_accuracies}

    def validation_answers(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print some answers of a validation, and give them to the trackers as a table. `rows`: those of a dump."""
        if not rows:
            return
        for row in rows:
            self._display.quote(f"  [{row['score']}] {row['input']!r} -> {row['output']!r} (expected {row['gts']!r})")
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[cell(row.get(name)) for name in columns] for row in rows]
        for tracker in self._trackers:
            tracker.table(step, VALIDATION_ANSWERS, columns, cells)

    def show_first_rewards(self, scores: Sequence[tuple[str, Score]]) -> None:
        """Print, once after each start, the rewards of each data source. `scores`: with the data source of each."""
        if not self._has_shown_rewards:
            self._has_shown_rewards = True
            self._display.message(reward_summary(scores))

    def message(self, text: str) -> None:
        self._display.message(text)

    def warning(self, message: str, *, kind: str, shown: str | None = None, **fields: Any) -> None:
        """`shown`: on the terminal, already in its language."""
        self._display.quote(translate(message) if shown is None else shown)
        self.events.write("warning", step=self._step, kind=kind, message=message, **fields)

    def dump_rollouts(self, folder: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """One JSON object a row (input, output, gts, score, step, ...) in `{folder}/{step}.jsonl`."""
        file = folder / f"{step}.jsonl"
        write_rows(file, rows)
        return file

    def truncate_after(self, step: int) -> None:
        """Forget what was logged after `step`: a resumed run will log it again. -1 forgets everything."""
        truncate_metrics(self.metrics_file, step)
        self._step = max(step, 0)
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        self.events.write("run", step=self._step, total_steps=self._total_steps, **process, **start_record())
        for notice in self._notices:
            self.events.write("warning", step=self._step, kind=NOTICE, message=notice)
        records = read_metrics(self.metrics_file)
        self._first_accuracies = _first_accuracies(records)
        self._display.remaining.add_history(records, self._step)

    def close(self, *, failed: bool = False) -> None:
        self._display.close()
        for tracker in self._trackers:
            tracker.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = "finished" if kind is None else "interrupted" if kind is KeyboardInterrupt else kind.__name__
        message = {} if error is None or status == "interrupted" else {"message": str(error)}
        self.events.write("end", status=status, **message)
        self.close(failed=kind is not None)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, with_aliases(metrics))


def _timings(seconds: Mapping[str, float]) -> dict[str, float]:
    return {f"timing_s/{name}": value for name, value in seconds.items()}


def _first_accuracies(records: Iterable[Mapping[str, float]]) -> dict[str, tuple[int, float]]:
    """(step, accuracy) of each data source, in what metrics.jsonl holds: a resumed run still knows its first."""
    return {source: next(iter(curve.items())) for source, curve in accuracy_curves(records).items()}


def reward_summary(scores: Sequence[tuple[str, Score]]) -> str:
    """`Rewards: openai/gsm8k 123 of 512 correct (24.0 %)`. `scores`: with the data source of each."""
    sources: dict[str, list[Score]] = {}
    for source, score in scores:
        sources.setdefault(source, []).append(score)
    return "Rewards: " + "; ".join(f"{source} {summary_of(found)}" for source, found in sources.items())


def summary_of(scores: Sequence[Score]) -> str:
    values = [score.accuracy for score in scores if score.accuracy is not None]
    failed = f", {len(scores) - len(values)} failed" if len(values) < len(scores) else ""
    if not values:
        return f"{len(scores)} failed"
    if measured(("", score) for score in scores)[""] == ACCURACY and set(values) <= {0, 1}:
        correct = round(sum(values))
        return f"{correct} of {len(values)} correct ({100 * correct / len(values):.1f} %){failed}"
    spread = f", std {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    return f"{len(values)} answers, mean {statistics.fmean(values):.3g}{spread}{failed}"
