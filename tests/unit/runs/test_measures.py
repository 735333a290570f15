"""Accuracy or score: what the numbers of a validation are called, and where every reader has it from."""

import json
from pathlib import Path

import pytest

from rloom import cli
from rloom.rewards.rules import format
from rloom.rewards.user_function import to_score
from rloom.runs.compare import compare
from rloom.runs.measures import measured, measures_of, shown
from rloom.runs.records import EventLog
from rloom.runs.run_folder import RunFolder, summarize
from rloom.runs.summary import summary_lines
from rloom.types import Score
from tests.run_directories import write_run

OWN = "val-core/own/acc/mean@1"


def validation(mean: float, best: float, above: float) -> dict[str, float]:
    return {OWN: mean, "val-aux/own/acc/best@1": best, "val-aux/own/acc/pass@1": above}


def test_only_a_reward_that_says_acc_of_every_answer_measures_an_accuracy() -> None:
    scores = [
        ("rule", Score(-1.0, {"acc": 0.0})), ("rule", Score(1.0, {"acc": 1.0})), ("rule", Score.failed("too late")),
        ("number", Score(0.0)), ("number", Score(1.0)),
        ("some", Score(1.0, {"acc": 1.0})), ("some", Score(0.5)),
        ("none", Score.failed("too late")),
    ]  # fmt: skip
    assert measured(scores) == {"rule": "accuracy", "number": "score", "some": "score"}


def test_a_format_is_no_accuracy_and_the_acc_of_a_function_is_one() -> None:
    matched = format.compute_score("s", "<b>", None, pattern="<.>")
    assert measured([("s", to_score(matched, "format"))]) == {"s": "score"}
    assert measured([("s", to_score({"score": -3.0, "acc": True}, "mine"))]) == {"s": "accuracy"}


def test_a_run_without_a_record_has_an_accuracy_if_its_scores_were_0_or_1() -> None:
    zero_or_one, between = validation(0.25, 0.25, 0.25), validation(0.551, 0.551, 0.6)
    assert measures_of([zero_or_one, {"critic/score/mean": 1.0}], {}) == {"own": "accuracy"}
    assert measures_of([zero_or_one, between], {}) == {"own": "score"}
    assert measures_of([zero_or_one], {"own": "score"}) == {"own": "score"}
    assert measures_of([validation(-0.422, -0.422, 0.0)], {}) == {"own": "score"}


def test_a_score_is_no_percentage() -> None:
    assert [shown(value, "accuracy") for value in (0.422, 1.0, -0.422, 3.0)] == ["42.2 %", "100.0 %", "-0.422", "3"]
    assert [shown(value, "score") for value in (0.422, -0.4219, 1234.5)] == ["0.422", "-0.422", "1,234"]


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    """The score of a function that returns minus one for a right answer."""
    path = write_run(tmp_path / "p" / "flipped", {}, {0: {OWN: -0.421875}, 1: {"critic/score/mean": -0.5}, 2: {OWN: 0}})
    EventLog(path / "events.jsonl").write("validation", step=2, metrics={OWN: 0.0}, measures={"own": "score"})
    return path


def test_every_reader_calls_it_a_score(
    flipped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RunFolder(flipped).measures == {"own": "score"}
    assert summarize(flipped).accuracy["own"].measure == "score"
    assert summary_lines(RunFolder(flipped)) == ["Held-out score on own: -0.422 at the start, 0 now, best 0 at step 2"]
    assert compare([RunFolder(flipped)]).accuracy[0].measure == "score"
    assert cli.main(["runs", str(flipped.parent)]) == 0
    assert "own score -0.422 → 0 " in capsys.readouterr().out
    assert cli.main(["compare", str(flipped), str(flipped)]) == 0
    printed = capsys.readouterr().out
    assert "score  step 0 " in printed and "-0.422 (+0)" in printed and "%" not in printed
    assert cli.main(["runs", "--json", str(flipped.parent)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["accuracy"]["own"]["measure"] == "score"
    monkeypatch.setenv("RLOOM_LANGUAGE", "zh")
    assert cli.main(["runs", str(flipped.parent)]) == 0
    assert "验证" in capsys.readouterr().out


def test_a_record_that_is_no_measure_is_skipped(flipped: Path) -> None:
    EventLog(flipped / "events.jsonl").write("validation", step=2, metrics={}, measures={"own": ["accuracy"]})
    assert RunFolder(flipped).measures == {"own": "score"} and RunFolder(flipped).skipped == 1
