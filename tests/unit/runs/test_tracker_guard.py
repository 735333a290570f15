"""A tracker that fails does not end the run, and says so once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rloom.runs import trackers
from rloom.runs.trackers import make_trackers
from rloom.runs.trackers.base import FileTracker, GuardedTracker, Start, cell, first_line
from rloom.runs.trackers.mlflow import metric_name, params


class Service:
    """A tracker whose service can be away."""

    def __init__(self) -> None:
        self.away = False
        self.calls: list[Any] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._call(name)

    def close(self, *, failed: bool = False) -> None:
        self._call("failed" if failed else "finished")

    def _call(self, what: Any) -> None:
        if self.away:
            raise OSError("https://me:secret@host refused\nand a page of advice")
        self.calls.append(what)


def test_a_failure_is_reported_once_and_the_service_is_tried_again_after_a_minute() -> None:
    service, said, now = Service(), list[str](), [0.0]
    tracker = GuardedTracker("mlflow", service, said.append, clock=lambda: now[0])
    tracker.log(1, {})
    service.away = True
    tracker.log(2, {})
    service.away = False
    now[0] = 59.0
    tracker.table(3, "t", [], [])  # left out: a minute has not passed
    now[0] = 60.0
    tracker.log(4, {})
    tracker.close(failed=True)
    assert service.calls == [1, 4, "failed"]
    assert said == [
        "mlflow: https://host refused; the run goes on, and tries again later",
        "mlflow: 2 calls failed or were left out; metrics.jsonl has all metrics",
    ]


def test_a_service_that_takes_a_minute_to_fail_is_tried_again_after_ten() -> None:
    now = [0.0]

    class Slow(Service):
        def _call(self, what: Any) -> None:
            now[0] += 60.0
            super()._call(what)

    service = Slow()
    service.away = True
    tracker = GuardedTracker("mlflow", service, lambda line: None, clock=lambda: now[0])
    tracker.log(1, {})  # fails at 60 s
    now[0] = 659.0
    tracker.log(2, {})
    assert now[0] == 659.0
    now[0] = 660.0
    tracker.log(3, {})
    assert now[0] == 720.0


def test_the_end_is_tried_even_right_after_a_failure() -> None:
    service = Service()
    tracker = GuardedTracker("x", service, lambda line: None, clock=lambda: 0.0)
    service.away = True
    tracker.log(1, {})
    service.away = False
    tracker.close()
    assert service.calls == ["finished"]


def test_an_interrupt_ends_the_run() -> None:
    class Interrupted(Service):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedTracker("x", Interrupted(), print).log(1, {})


def test_a_library_that_cannot_start_leaves_the_run_without_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(given: Start) -> trackers.Tracker:
        raise RuntimeError("no database")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", broken)
    said: list[str] = []
    found = make_trackers(["wandb"], Start(tmp_path, "p", "e", {}, report=said.append))
    assert [type(tracker) for tracker in found] == [FileTracker]
    assert said == ["wandb: it cannot start (RuntimeError: no database); the run goes on without it"]


def test_ids_are_kept_for_resumed_runs_only(tmp_path: Path) -> None:
    new, resumed = (Start(tmp_path / "run", "p", "e", {}, each) for each in (False, True))
    assert resumed.run_id("wandb") is None
    new.keep_run_id("wandb", "a")
    new.keep_run_id("mlflow", "b")
    assert (new.run_id("wandb"), resumed.run_id("wandb"), resumed.run_id("mlflow")) == (None, "a", "b")


def test_a_long_error_is_cut_and_an_empty_one_is_named_by_its_class() -> None:
    assert first_line(OSError("  one\ntwo")) == "one"
    assert first_line(TimeoutError()) == "TimeoutError"
    assert len(first_line(OSError("word " * 1000))) <= 240


def test_a_cell_is_text_or_a_number() -> None:
    assert [cell(value) for value in (None, True, 1, 0.5, "四")] == [None, True, 1, 0.5, "四"]
    assert cell({"答案": [1, 2]}) == '{"答案": [1, 2]}'


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("critic/score/mean", "critic/score/mean"),
        ("val-core/openai/gsm8k/acc/mean@1", "val-core/openai/gsm8k/acc/mean_at_1"),
        ("reward/format(0.1)+len%", "reward/format_0.1__len_"),
        ("数学/acc", "数学/acc"),
        ("/a//../b/./c:d", "a/b/c_d"),
        ("x" * 300, "x" * 250),
        ("..", "_"),
    ],
)
def test_names_that_mlflow_refuses_are_changed(name: str, accepted: str) -> None:
    assert metric_name(name) == accepted


def test_the_configuration_becomes_flat_short_texts_for_mlflow() -> None:
    config = {"a": {"b": 1, "c": {"d": None}}, "e": [1, "x"], "f": {}, "g": "y" * 600}
    assert params(config) == {"a.b": "1", "a.c.d": "None", "e": "[1, 'x']", "f": "{}", "g": "y" * 500}
