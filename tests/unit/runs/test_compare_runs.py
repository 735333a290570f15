"""Runs side by side, and `rloom compare`."""

import json
from pathlib import Path

import pytest

from rloom import cli
from rloom.runs.compare import Point, compare, compare_configs, sparkline, spread, tenths
from rloom.runs.run_folder import RunFolder
from tests.run_directories import write_run

ACC = "val-core/openai/gsm8k/acc/mean@1"
PPO = {"algorithm": {"adv_estimator": "gae", "lam": 0.95}, "trainer": {"logger": ["console"]}}
GRPO = {"algorithm": {"adv_estimator": "grpo", "lam": 1.0}, "trainer": {"logger": ["console"]}, "new": {"key": 1}}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The first validates at steps 0, 2 and 4; the second, which still runs, at steps 0, 1 and 2."""
    first = {0: {ACC: 0.25}} | {step: {"critic/score/mean": step / 10, "timing_s/step": 2.0} for step in range(1, 5)}
    first[2] |= {ACC: 0.75}
    first[4] |= {ACC: 0.5}
    second = {0: {ACC: 0.25}, 1: {"critic/score/mean": 0.3, ACC: 0.25}, 2: {"critic/score/mean": 0.5, ACC: 0.5}}
    return [
        write_run(tmp_path / "a" / "run", PPO, first, end="finished", total_steps=4),
        write_run(tmp_path / "b" / "run", GRPO, second, total_steps=4),
    ]


def test_keys_that_differ_with_their_defaults(runs: list[Path]) -> None:
    defaults = {"algorithm.adv_estimator": "gae", "algorithm.lam": 1.0}
    found = {each.key: each for each in compare([RunFolder(path) for path in runs], defaults).config}
    assert set(found) == {"algorithm.adv_estimator", "algorithm.lam", "new.key"}
    assert (found["algorithm.lam"].values, found["algorithm.lam"].is_default) == ([0.95, 1.0], [False, True])
    assert (found["new.key"].values, found["new.key"].present) == ([None, 1], [False, True])


def test_a_run_without_a_configuration_differs_in_no_key() -> None:
    assert compare_configs([{}, {"a": 1}], {}) == []
    assert [each.key for each in compare_configs([{}, {"a": 1}, {"a": 2}], {})] == ["a"]


def test_files_in_the_own_folder_of_a_run_are_no_difference() -> None:
    def config(folder: str, cache: str) -> dict[str, object]:
        return {"trainer": {"default_local_dir": folder}, "judge": {"cache_dir": cache}}

    assert compare_configs([config("runs/a", "runs/a/cache"), config("runs/b", "runs/b/cache")], {}) == []
    (found,) = compare_configs([config("runs/a", "runs/a/cache"), config("runs/b", "runs/a/cache")], {})
    assert found.key == "judge.cache_dir"
    assert found.values == ["${trainer.default_local_dir}/cache", "runs/a/cache"]


def test_secrets_that_differ_are_a_difference_and_are_not_shown() -> None:
    def config(key: str, address: str) -> dict[str, object]:
        return {"judge": {"api_key": key, "address": address}}

    found = compare_configs([config("abc", "https://u:p@h"), config("def", "https://u:q@h"), config("", "h")], {})
    assert {each.key: each.values for each in found} == {
        "judge.api_key": ["***", "***", ""],
        "judge.address": ["https://***@h", "https://***@h", "h"],
    }


def test_accuracy_at_common_steps_and_at_each_runs_own(runs: list[Path]) -> None:
    (found,) = compare([RunFolder(path) for path in runs]).accuracy
    assert (found.source, found.common_steps) == ("openai/gsm8k", [0, 2])
    assert found.first_common == [Point(0, 0.25), Point(0, 0.25)]
    assert found.last_common == [Point(2, 0.75), Point(2, 0.5)]
    assert found.best == [Point(2, 0.75), Point(2, 0.5)]
    assert found.last == [Point(4, 0.5), Point(2, 0.5)]


def test_metrics_are_compared_at_the_steps_that_all_runs_have(runs: list[Path]) -> None:
    found = {each.label: each for each in compare([RunFolder(path) for path in runs]).metrics}
    assert set(found) == {"reward", "seconds a step"}
    assert (found["reward"].steps, found["reward"].rows) == ([1, 2], [[0.1, 0.3], [0.2, 0.5]])
    assert found["reward"].series[0] == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert (found["seconds a step"].steps, found["seconds a step"].series[1]) == ([], {})


def test_every_tenth_of_the_common_steps() -> None:
    assert tenths(range(1, 102)) == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101]
    assert tenths([3, 5]) == [3, 5]
    assert tenths([]) == []


def test_a_curve_as_text() -> None:
    assert sparkline([0.0, 0.5, 1.0], 0.0, 1.0) == "▁▅█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 0.0, 1.0, width=2) == "▁█"
    assert sparkline([2.0, 2.0], 2.0, 2.0) == "▁▁"
    assert sparkline([], 0.0, 1.0) == ""


def test_runs_without_anything_in_common_are_compared(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name, {}, {}) for name in ("a", "b")]
    found = compare([RunFolder(path) for path in paths])
    assert (found.config, found.accuracy, found.metrics, found.last_steps) == ([], [], [], [0, 0])


# ---- the command


def test_two_runs_in_the_terminal(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *map(str, runs)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [f"A {runs[0]} finished, step 4 of 4", f"B {runs[1]} running, step 2 of 4"]
    assert "algorithm.adv_estimator gae (default) grpo" in lines
    assert "new.key - 1" in lines
    assert "openai/gsm8k acc % step 2, the last of all 75.0 50.0 (-25.0)" in lines
    assert "openai/gsm8k acc % last 50.0 at 4 50.0 (+0.0) at 2" in lines
    start = lines.index("step 1 step 2")
    assert lines[start + 1 : start + 4] == [
        "reward A ▁▃▄▆ 0.1 0.2",
        "B ▄█ 0.3 0.5",  # one scale: the second run reaches higher
        "B-A +0.2 +0.3",
    ]


def test_as_many_steps_are_shown_as_fit() -> None:
    assert spread(11, 4) == [0, 3, 7, 10]
    assert spread(3, 9) == [0, 1, 2]
    assert spread(5, 0) == [0, 4]
    assert (spread(1, 9), spread(0, 9)) == ([0], [])


def test_three_runs_as_json(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", *map(str, [*runs, runs[0]]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [str(runs[0]), str(runs[1]), str(runs[0])]
    assert found["metrics"][0]["rows"] == [[0.1, 0.3, 0.1], [0.2, 0.5, 0.2]]


def test_a_folder_that_is_no_run_is_named(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(runs[0]), str(tmp_path)]) == 2
    assert f"{tmp_path} is no run directory" in capsys.readouterr().err


def test_one_run_is_not_compared(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", str(runs[0])])
    assert ended.value.code == 2
    assert "it takes 2 to 26 runs" in capsys.readouterr().err
