"""Search and distributions over all answers, and validations of two runs, in numbers of `tests.view_runs`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rloom.runs.dumps.reader import Dumps
from tests.view_client import Viewer, viewing
from tests.view_runs import answer_text, train_rows, write_hostile_run, write_run


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("view")
    write_run(folder / "sums" / "whole")
    write_run(folder / "sums" / "half", steps=4)
    write_hostile_run(folder / "hostile" / "run")
    with viewing([folder / "sums" / "whole", folder / "sums" / "half", folder / "hostile"]) as started:
        yield started


def run(viewer: Viewer, name: str) -> int:
    return next(run["id"] for run in viewer.get("/api/runs")["runs"] if run["name"].endswith(name))


def searched(viewer: Viewer, name: str, text: str, parameters: str = "") -> Any:
    return viewer.get(f"/api/runs/{run(viewer, name)}/search?text={quote(text)}{parameters}")


def test_a_search_finds_answers_of_all_steps_the_last_first(viewer: Viewer) -> None:
    found = searched(viewer, "whole", "ANSWER 2: let me think about question 10.")  # in steps 1, 3, 5, 7, in group 4
    assert [(step["step"], step["count"]) for step in found["steps"]] == [(7, 1), (5, 1), (3, 1), (1, 1)]
    assert (found["searched"], found["left"], found["before"], found["skipped"]) == (8, 0, None, 0)
    (answer,) = found["steps"][2]["answers"]
    assert (answer["group"], answer["number"], answer["score"], answer["data_source"]) == (4, 3, 0.0, "sums")
    assert answer["excerpt"] == answer_text(10, 3, 2, 0.0) and answer["cut"] == [False, False]


def test_a_search_goes_on_where_the_request_before_has_ended(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = "let me think"
    first = searched(viewer, "whole", everywhere)
    # 24 answers in each step, of which 10 are sent, until 50 are there
    assert [(step["step"], step["count"], len(step["answers"])) for step in first["steps"]] == [
        (step, 24, 10) for step in (8, 7, 6, 5, 4)
    ]
    assert (first["left"], first["before"]) == (3, 4)
    rest = searched(viewer, "whole", everywhere, "&before=4")
    assert [step["step"] for step in rest["steps"]] == [3, 2, 1] and rest["left"] == 0
    monkeypatch.setattr("rloom.view.answers.BUDGET_S", -1.0)  # every request still makes progress
    assert searched(viewer, "whole", "nowhere at all")["before"] == 8


def test_a_search_in_validations_and_one_that_finds_nothing(viewer: Viewer) -> None:
    found = searched(viewer, "whole", "at step 4, answer 1", "&kind=validation")
    assert [(step["step"], step["count"]) for step in found["steps"]] == [(4, 6)]
    assert searched(viewer, "whole", "at step 99")["steps"] == []


@pytest.mark.parametrize(
    "text", ["(a+)+$", "[", "\\", ".*", "(?i)", "%", "\x00", "W" * 199, "答案", "<script>", "\u202e"]
)
def test_a_text_is_no_pattern_and_cannot_hold_up_the_server(viewer: Viewer, text: str) -> None:
    started = time.monotonic()
    found = searched(viewer, "run", text)
    assert time.monotonic() - started < 30
    answers = [answer for step in found["steps"] for answer in step["answers"]]
    assert all(text.casefold() in answer["excerpt"].casefold() for answer in answers)
    assert bool(answers) == (text in ("W" * 199, "答案", "<script>", "\u202e", "%", "[", "\x00"))


@pytest.mark.parametrize(
    "parameters", ["", "text=", "text=%20", f"text={'x' * 201}", "text=a&kind=x", "text=a&before=-1"]
)
def test_a_search_that_cannot_be_made_is_refused(viewer: Viewer, parameters: str) -> None:
    assert viewer.fault(f"/api/runs/0/search?{parameters}")[0] == 400


def test_a_step_whose_dump_is_gone_is_counted_and_the_others_are_searched(tmp_path: Path) -> None:
    write_run(tmp_path / "sums" / "grpo", steps=3)
    (tmp_path / "sums" / "grpo" / "rollouts" / "train" / "2.parquet").unlink()
    with viewing([tmp_path]) as viewer:
        found = viewer.get("/api/runs/0/search?text=let%20me")
        assert [step["step"] for step in found["steps"]] == [3, 1] and found["skipped"] == 1
        spread = viewer.get("/api/runs/0/distributions")
        assert spread["step"] == [1, 2, 3] and spread["score"][1] is None and spread["length"][1] is None


def test_quantiles_of_scores_and_lengths_of_each_step(viewer: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"/api/runs/{run(viewer, 'whole')}/distributions"
    found = viewer.get(address)
    assert (found["step"], found["every"], found["left"]) == ([1, 2, 3, 4, 5, 6, 7, 8], 1, 0)
    for step in (3, 8):
        rows = train_rows(step)
        scores = sorted(row["score"] for row in rows if row["score"] is not None)
        lengths = sorted(row["length"] for row in rows)
        quantiles, spread = found["score"][step - 1], found["length"][step - 1]
        assert len(quantiles) == len(spread) == 21
        assert (quantiles[0], quantiles[10], quantiles[-1]) == (0.0, scores[len(scores) // 2], 1.0)
        assert (spread[0], spread[-1]) == (lengths[0], lengths[-1])
    assert viewer.get(f"{address}?after=6")["step"] == [7, 8]
    assert viewer.get(f"{address}?kind=validation")["step"] == [0, 4, 8]
    monkeypatch.setattr("rloom.view.answers.MOST_STEPS", 3)  # of 8 steps, every third
    assert viewer.get(address)["step"] == [1, 4, 7]


def test_distributions_do_not_read_the_answers(viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    read = Dumps._table

    def table(self: Dumps, kind: Any, step: int, columns: Any, group: int | None = None) -> Any:
        asked.append(list(columns))
        return read(self, kind, step, columns, group)

    monkeypatch.setattr(Dumps, "_table", table)
    viewer.get(f"/api/runs/{run(viewer, 'half')}/distributions")
    assert asked == [["score", "length"]] * 4


def test_what_one_run_fixed_and_broke_of_another(viewer: Viewer) -> None:
    half, whole = run(viewer, "half"), run(viewer, "whole")
    # the last validations: step 4 of one, step 8 of the other
    found = viewer.get(f"/api/compare/validation?runs={half},{whole}")
    assert (found["before"], found["after"], found["unscored"]) == (4, 8, 1)
    assert found["counts"] == {"fixed": 1, "broken": 1, "right": 2, "wrong": 1}
    outcomes = {row["index"]: row["outcome"] for row in found["rows"]}
    assert outcomes == {0: "fixed", 1: "broken", 2: "right", 3: "wrong", 4: "right"}
    first = found["rows"][0]
    assert first["before"]["answer"] == answer_text(0, 4, 0, 0.0) and first["after"]["answer"] == answer_text(
        0, 8, 0, 1.0
    )
    turned = viewer.get(f"/api/compare/validation?runs={whole},{half}&outcome=fixed")
    assert [row["index"] for row in turned["rows"]] == [1]
    both = viewer.get(f"/api/compare/validation?runs={half},{whole}&before=0&after=0")
    assert both["counts"]["fixed"] == both["counts"]["broken"] == 0


def test_rows_of_other_data_are_not_compared(viewer: Viewer) -> None:
    found = viewer.get(f"/api/compare/validation?runs={run(viewer, 'whole')},{run(viewer, 'run')}")
    assert (found["rows"], found["unscored"]) == ([], 0)


@pytest.mark.parametrize("runs", ["", "0", "0,0", "0,1,2", "0,x"])
def test_answers_of_two_runs_need_two_runs(viewer: Viewer, runs: str) -> None:
    status, error = viewer.fault(f"/api/compare/validation?runs={runs}")
    assert status == 400 and error.endswith("use the numbers of 2 runs, as in runs=0,1")
