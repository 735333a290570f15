import json
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from rloom.runs.display import Display
from rloom.runs.runlog import RunLog
from rloom.runs.trackers.base import FileTracker
from rloom.types import Score

MEASURES = {"s": "accuracy"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Recorded(RunLog):
    """A run log with a clock in the hand, and its console on paper."""

    def __init__(self, run_dir: Path, console: Console | None = None) -> None:
        self.clock = Clock()
        self.paper = console or Console(file=StringIO(), width=80)
        display = Display(self.paper, total_steps=4)
        super().__init__(run_dir, trackers=[FileTracker(run_dir)], display=display, clock=self.clock)

    def spend(self, name: str, seconds: float) -> None:
        with self.span(name):
            self.clock.now += seconds

    @property
    def printed(self) -> str:
        assert isinstance(self.paper.file, StringIO)
        return self.paper.file.getvalue()


@pytest.fixture
def log(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "run")


def records(log: RunLog) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.metrics_file.read_text().splitlines()]


def test_repeated_spans_add_up_and_start_anew_with_the_next_step(log: Recorded) -> None:
    log.spend("gen", 2.0)
    log.spend("update_actor", 1.0)
    log.spend("update_actor", 0.5)
    log.step(1, {"critic/score/mean": 0.5})
    log.spend("gen", 3.0)
    log.step(2, {})
    assert records(log) == [
        {"step": 1, "critic/score/mean": 0.5, "timing_s/gen": 2.0, "timing_s/update_actor": 1.5, "reward_mean": 0.5},
        {"step": 2, "timing_s/gen": 3.0},
    ]


def test_an_outer_span_holds_the_time_of_the_inner_ones(log: Recorded) -> None:
    with log.span("step"):
        log.spend("gen", 2.0)
        with log.span("adv"):
            log.spend("adv", 1.0)  # counted once
    log.step(1, {})
    assert records(log) == [{"step": 1, "timing_s/gen": 2.0, "timing_s/adv": 1.0, "timing_s/step": 3.0}]
    assert log.printed == "step 1/4 · 3.0 s\n"


def test_a_span_that_raises_is_timed_and_closed(log: Recorded) -> None:
    with pytest.raises(ValueError, match="reward"), log.span("reward"):
        log.clock.now += 1.0
        raise ValueError("reward")
    log.advance(1, 2)  # no stage is open: nothing moves, nothing breaks
    log.step(1, {})
    assert records(log) == [{"step": 1, "timing_s/reward": 1.0}]


def test_a_validation_is_logged_with_its_own_time_only(log: Recorded) -> None:
    log.spend("testing", 5.0)
    log.validation(0, {"val-core/s/acc/mean@1": 0.375}, MEASURES)
    log.spend("gen", 1.0)
    log.spend("testing", 4.0)
    log.validation(1, {"val-core/s/acc/mean@1": 0.5}, MEASURES)
    log.step(1, {"critic/score/mean": 0.5})
    assert records(log) == [
        {"step": 0, "val-core/s/acc/mean@1": 0.375, "timing_s/testing": 5.0},
        {"step": 1, "val-core/s/acc/mean@1": 0.5, "timing_s/testing": 4.0},
        {"step": 1, "critic/score/mean": 0.5, "timing_s/gen": 1.0, "reward_mean": 0.5},
    ]
    assert log.printed.splitlines() == [
        "step 0 · validation · s acc 37.5 %",
        "step 1 · validation · s acc 50.0 % (start 37.5 %)",
        "step 1/4 · reward_mean 0.500",
    ]


def test_a_resumed_run_shows_no_step_twice_and_remembers_where_it_started(log: Recorded) -> None:
    log.validation(0, {"val-core/s/acc/mean@1": 0.25}, MEASURES)
    for step in (1, 2, 3):
        log.step(step, {"x": 1.0})
    with log.metrics_file.open("a") as file:
        file.write('{"step": 4, "x"')

    resumed = Recorded(log.run_dir)
    resumed.truncate_after(2)
    resumed.step(3, {"x": 2.0})
    resumed.validation(3, {"val-core/s/acc/mean@1": 0.75}, MEASURES)
    assert [(record["step"], record.get("x")) for record in records(resumed)] == [
        (0, None),
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (3, None),
    ]
    assert resumed.printed.splitlines()[-1] == "step 3 · validation · s acc 75.0 % (start 25.0 %)"


def test_a_run_that_starts_anew_forgets_everything(log: Recorded) -> None:
    log.validation(0, {"val-core/s/acc/mean@1": 0.25}, MEASURES)
    anew = Recorded(log.run_dir)
    anew.truncate_after(-1)
    anew.validation(0, {"val-core/s/acc/mean@1": 0.5}, MEASURES)
    assert records(anew) == [{"step": 0, "val-core/s/acc/mean@1": 0.5}]
    assert anew.printed == "step 0 · validation · s acc 50.0 %\n"


def test_the_bar_of_the_current_stage_moves(tmp_path: Path) -> None:
    log = Recorded(tmp_path, Console(file=StringIO(), width=80, force_terminal=True, color_system=None))
    with log.span("step"), log.span("gen"):
        log.advance(3, 8)
        log.message("a word in between")
    log.close()
    assert "rollout" in log.printed
    assert "8/8" in log.printed
    assert "a word in between" in log.printed


def test_dumped_rollouts_are_whole_or_absent(log: Recorded, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"input": "1+1=", "output": "二\u2028\n", "gts": "2", "score": 1.0, "step": 7},
        {"input": "2+2=", "output": "?", "gts": np.array([4, 5]), "score": float("nan"), "step": np.int64(7)},
        {"input": "3", "output": "", "gts": {"a": Path("x"), 1: (np.float32("nan"), True)}, "score": None, "step": 7},
    ]
    file = log.dump_rollouts(tmp_path / "dump", 7, rows)
    assert file == tmp_path / "dump" / "7.jsonl"
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]] == [
        rows[0],
        {"input": "2+2=", "output": "?", "gts": [4, 5], "score": None, "step": 7},
        {"input": "3", "output": "", "gts": {"a": "x", "1": [None, True]}, "score": None, "step": 7},
    ]

    def broken() -> Any:
        yield rows[0]
        raise RuntimeError("the run was killed here")

    with pytest.raises(RuntimeError):
        log.dump_rollouts(tmp_path / "dump", 8, broken())
    assert [path.name for path in (tmp_path / "dump").iterdir()] == ["7.jsonl"]


def test_without_console_among_the_loggers_a_run_is_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog.open(tmp_path, loggers=["file"], project="p", experiment="e", config={}, total_steps=4) as log:
        with log.span("gen"):
            log.advance(1, 1)
        log.message("hello")
        log.step(1, {"x": 1.0})
    assert capsys.readouterr() == ("", "")
    assert records(log)[0]["x"] == 1.0


def test_with_console_the_lines_go_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog.open(tmp_path, loggers=["console"], project="p", experiment="e", config={}, total_steps=4) as log:
        log.message("starting")
        log.step(1, {"critic/score/mean": 0.5})
    assert capsys.readouterr().out == "starting\nstep 1/4 · reward_mean 0.500\n"


def test_the_rewards_of_the_first_step_are_shown_once_by_data_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = [("openai/gsm8k", Score(value, {"acc": value})) for value in (1.0, 0.0, 0.0)]
    mixed = [
        *scores,
        ("zero_or_one", Score(0.0)),
        ("mine", Score(0.25)),
        ("mine", Score(0.75)),
        ("mine", Score.failed("too late")),
    ]
    with RunLog.open(tmp_path, loggers=["console"], project="p", experiment="e", config={}) as log:
        log.show_first_rewards(mixed)
        log.show_first_rewards(scores)
    assert capsys.readouterr().out == (
        "Rewards: openai/gsm8k 1 of 3 correct (33.3 %); zero_or_one 1 answers, mean 0; "
        "mine 2 answers, mean 0.5, std 0.354, 1 failed\n"
    )


def test_answers_of_a_validation_are_printed_and_given_to_the_trackers_as_a_table(tmp_path: Path) -> None:
    class Tables(FileTracker):
        tables: ClassVar[list[Any]] = []

        def table(self, step: int, name: str, columns: Any, rows: Any) -> None:
            self.tables.append((step, name, columns, rows))

    paper = Console(file=StringIO(), width=80)
    log = RunLog(tmp_path, trackers=[Tables(tmp_path)], display=Display(paper, total_steps=4))
    rows = [
        {"input": "2+2", "output": "4", "gts": "4", "score": 1.0, "format": 0.5},
        {"input": "2+3", "output": "six", "gts": ["5"], "score": 0.0},
    ]
    log.validation_answers(3, [])
    log.validation_answers(4, rows)
    assert isinstance(paper.file, StringIO)
    assert paper.file.getvalue().splitlines()[0] == "  [1.0] '2+2' -> '4' (expected '4')"
    columns = ["input", "output", "gts", "score", "format"]
    cells = [["2+2", "4", "4", 1.0, 0.5], ["2+3", "six", '["5"]', 0.0, None]]
    assert Tables.tables == [(4, "val/generations", columns, cells)]


def test_trackers_hear_whether_the_run_ended_as_planned(tmp_path: Path) -> None:
    heard: list[bool] = []

    class Listener(FileTracker):
        def close(self, *, failed: bool = False) -> None:
            heard.append(failed)

    for error in (None, KeyboardInterrupt, ValueError):
        with (
            suppress(KeyboardInterrupt, ValueError),
            RunLog(tmp_path, trackers=[Listener(tmp_path)], display=Display(total_steps=4, quiet=True)),
        ):
            if error is not None:
                raise error
    assert heard == [False, True, True]
