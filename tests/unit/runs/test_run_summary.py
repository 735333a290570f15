"""A run in one line, and `rloom runs`."""

import json
from pathlib import Path
from typing import Any

import pytest

from rloom import cli
from rloom.cli.runs import accuracy_lines, age
from rloom.runs.run_folder import Accuracy, RunFolder, RunSummary, Status, last_events, summaries, summarize
from tests.run_directories import write_run

ACC = "val-core/openai/gsm8k/acc/mean@1"


def test_a_run_in_one_line(tmp_path: Path) -> None:
    config = {"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-0.5B"}}}
    steps = {0: {ACC: 0.25}, 1: {"critic/score/mean": 0.5}, 2: {"critic/score/mean": 0.0, ACC: 0.75}, 3: {ACC: 0.5}}
    path = write_run(tmp_path / "math" / "grpo", config, steps, end="finished", total_steps=3)
    found = summarize(path)
    assert (found.name, found.algorithm, found.model, found.reward) == ("math/grpo", "grpo", "Qwen/Qwen2.5-0.5B", 0.0)
    assert found.accuracy == {"openai/gsm8k": Accuracy("accuracy", 0.25, 0, 0.5, 3, best=0.75, best_step=2)}
    assert (found.state.status, found.state.step, found.state.total_steps) == (Status.FINISHED, 3, 3)
    assert accuracy_lines(found) == ["gsm8k acc 25.0 → 50.0 % (best 75.0 % at 2)"]


@pytest.mark.parametrize("end", [None, "finished", "interrupted", "TrainingError"])
def test_the_state_is_that_of_the_whole_events(tmp_path: Path, end: str | None) -> None:
    path = write_run(tmp_path / "run", {}, {step: {"critic/score/mean": 1.0} for step in range(1, 9)}, end=end)
    write_run(path, {}, {step: {"critic/score/mean": 1.0} for step in (5, 6)}, end=end, resumed_from=4)
    assert summarize(path).state == RunFolder(path).state
    assert summarize(path).state.step == 6


def test_a_run_that_has_just_started_or_is_being_written_has_a_state(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {}, {})
    assert summarize(path).state == RunFolder(path).state
    with (path / "events.jsonl").open("a") as events:
        events.write('{"time": 12.0, "event": "step", "st')
    assert summarize(path).state == RunFolder(path).state
    (path / "events.jsonl").write_text("")
    assert last_events(path / "events.jsonl") == []
    assert summarize(path).state.status is Status.UNKNOWN


def test_a_text_inside_an_event_is_no_event(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {}, {1: {}}, total_steps=7)
    message = json.dumps({"time": 3.0, "event": "warning", "step": 1, "message": '{"event": "run"}'})
    with (path / "events.jsonl").open("a") as events:
        events.write(f"{message}\n")
    assert summarize(path).state.total_steps == 7


def test_supervised_fine_tuning_has_no_estimator(tmp_path: Path) -> None:
    found = summarize(write_run(tmp_path / "run", {"model": {"path": "embedded"}}, {1: {"train/loss": 2.0}}))
    assert (found.algorithm, found.model, found.reward, found.accuracy) == ("sft", "embedded", None, {})


def test_the_last_written_run_is_first(tmp_path: Path) -> None:
    write_run(tmp_path / "p" / "old", {}, {1: {}}, time=100.0)
    write_run(tmp_path / "p" / "new", {}, {1: {}}, time=300.0)
    write_run(tmp_path / "q" / "middle", {}, {1: {}}, time=200.0)
    assert [each.name for each in summaries([tmp_path / "q", tmp_path])] == ["p/new", "q/middle", "p/old"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s ago"), (59, "59 s ago"), (120, "2 min ago"), (7300, "2 h ago"), (200000, "2 d ago")]
)
def test_times(seconds: float, text: str) -> None:
    assert age(seconds) == text


# ---- the command


def test_runs_are_listed_with_their_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "checkpoints" / "math" / "a[1]", {}, {0: {ACC: 0.5}, 4: {}}, end="OSError", total_steps=9)
    assert cli.main(["runs"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "run",
        "state",
        "findings",
        "step",
        "reward",
        "validation",
        "algorithm",
        "model",
        "written",
    ]
    shown = ["math/a[1]", "failed:", "OSError", "1", "(ERROR)", "4/9", "gsm8k", "acc"]
    assert line.split()[:8] == shown


def test_runs_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "math" / "a", {}, {0: {ACC: 0.5}}, end="finished")
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["path"], found["state"]["status"]) == (str(path), "finished")
    assert found["accuracy"]["openai/gsm8k"]["last"] == 0.5
    assert found["findings"] == {"count": 0, "worst": None}


def test_ill_runs_are_marked_as_the_doctor_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {step: {"critic/score/mean": 0.0, "critic/score/max": 0.0, "critic/score/min": 0.0} for step in range(1, 13)}
    write_run(tmp_path / "math" / "ill", {}, zero, end="finished")
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["findings"] == {"count": 1, "worst": "reward_zero"}
    monkeypatch.setattr("rloom.cli.runs.DIAGNOSIS_S", -1.0)  # many long runs: the list does not wait for all of them
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "Not diagnosed, to save time: 1 run (`rloom doctor RUN`)" in capsys.readouterr().out


def test_a_folder_without_runs_and_one_that_is_not_there_say_how_to_name_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert f"no run in {tmp_path}" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert cli.main(["runs"]) == 2
    assert "there is no folder checkpoints; name the folder of the runs: rloom runs DIR" in capsys.readouterr().err


def test_every_field_of_a_summary_can_be_written_as_json(tmp_path: Path) -> None:
    from rloom.cli.runs import as_object

    found: RunSummary = summarize(write_run(tmp_path / "run", {}, {}))
    loaded: dict[str, Any] = json.loads(json.dumps(as_object(found, None)))
    assert loaded.pop("findings") is None
    assert set(loaded) == {"path", "name", "state", "reward", "accuracy", "algorithm", "model", "fault"}
