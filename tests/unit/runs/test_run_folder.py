"""Reading a run directory while a run writes to it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rloom.errors import DataError
from rloom.runs.records import EventLog, JsonLines
from rloom.runs.run_folder import RunFolder, Status, flat_config, run_directories

HERE = {"host": socket.gethostname(), "pid": os.getpid()}


def log_of(folder: Path, *, start: int = 0, **process: object) -> EventLog:
    folder.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder / "events.jsonl")
    log.write("run", step=start, total_steps=8, **(process or HERE))
    return log


def test_a_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = JsonLines(file, lambda row: row)
    assert lines.read() == ([], False)
    file.write_bytes(b'{"a": 1}\n{"a": ')
    assert lines.read() == ([{"a": 1}], False)
    assert lines.read() == ([], False)
    with file.open("ab") as out:
        out.write(b"2}\nbroken\n[3]\n")
    assert lines.read() == ([{"a": 2}], False) and lines.skipped == 2


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    lines = JsonLines(file, lambda row: row)
    lines.read()
    (tmp_path / "new").write_text('{"a": 3}\n')
    (tmp_path / "new").replace(file)
    assert lines.read() == ([{"a": 3}], True)


def test_a_line_that_is_too_long_is_counted_once_and_is_never_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rloom.runs.records.LONGEST_LINE", 10)
    file = tmp_path / "lines"
    lines = JsonLines(file, lambda row: row if row.get("a") != 5 else None)
    file.write_text('{"a": 1}\n{"b": "' + "x" * 25)
    assert lines.read() == ([{"a": 1}], False) and lines.skipped == 0
    with file.open("a") as out:
        out.write('"}\n\n{"a": 5}\n{"a": 2}\n')
    assert lines.read() == ([{"a": 2}], False)
    assert lines.skipped == 2  # the long one and the one that the check refuses, not the empty one


def test_metrics_of_a_step_and_its_validation_are_one_dict_and_unknown_values_are_left_out(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    run = RunFolder(tmp_path)
    log.write("step", step=1, metrics={"a": 0.5, "b": float("nan")})
    assert run.refresh()
    assert run.metrics == [{"step": 1, "a": 0.5}]
    log.write("validation", step=1, metrics={"c": 2.0})
    log.write("step", step=2, metrics={"a": 0.25})
    assert run.refresh() and not run.refresh()
    assert run.metrics == [{"step": 1, "a": 0.5, "c": 2.0}, {"step": 2, "a": 0.25}]


def test_a_resumed_run_replaces_the_later_steps_and_changes_the_generation(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    for step in (1, 2, 3):
        log.write("step", step=step, metrics={"a": step})
    run = RunFolder(tmp_path)
    log_of(tmp_path, start=1).write("step", step=2, metrics={"a": 20})
    assert run.generation == 0
    run.refresh()
    assert run.generation == 1
    assert run.metrics == [{"step": 1, "a": 1}, {"step": 2, "a": 20}]
    assert run.state.step == 2


@pytest.mark.parametrize(
    ("written", "status", "error"),
    [
        ("finished", Status.FINISHED, None),
        ("interrupted", Status.INTERRUPTED, None),
        ("TrainingError", Status.FAILED, "TrainingError"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, written: str, status: Status, error: str | None) -> None:
    log_of(tmp_path).write("end", status=written)
    state = RunFolder(tmp_path).state
    assert (state.status, state.error, state.step, state.total_steps) == (status, error, 0, 8)


def test_a_run_whose_process_is_alive_is_running_and_one_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    log_of(tmp_path / "alive")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    log_of(tmp_path / "dead", host=socket.gethostname(), pid=gone.pid)
    assert RunFolder(tmp_path / "alive").state.status is Status.RUNNING
    assert RunFolder(tmp_path / "dead").state.status is Status.KILLED


def test_a_run_of_another_machine_runs_while_it_writes(tmp_path: Path) -> None:
    log_of(tmp_path, host="elsewhere", pid=1)
    assert RunFolder(tmp_path).state.status is Status.RUNNING
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line | {"time": 1.0}) + "\n" for line in lines))
    assert RunFolder(tmp_path).state.status is Status.UNKNOWN


def test_a_run_that_was_started_again_after_an_error_is_running(tmp_path: Path) -> None:
    log_of(tmp_path).write("end", status="WorkerError")
    log_of(tmp_path)
    assert RunFolder(tmp_path).state.status is Status.RUNNING


def test_runs_below_a_folder_are_found_and_not_searched_for_others(tmp_path: Path) -> None:
    log_of(tmp_path / "p" / "one").write("end", status="finished")
    log_of(tmp_path / "p" / "two")
    (tmp_path / "p" / "two" / "global_step_1").mkdir()
    (tmp_path / "p" / "two" / "global_step_1" / "config.yaml").write_text("{}")
    assert list(run_directories(tmp_path)) == [tmp_path / "p" / "one", tmp_path / "p" / "two"]


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        RunFolder(tmp_path)


def test_config_is_nested_flat_and_empty_if_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("algorithm: {lam: 0.95, kl_ctrl: {type: fixed}}\ntrainer: {}\n")
    run = RunFolder(tmp_path)
    assert flat_config(run.config) == {"algorithm.lam": 0.95, "algorithm.kl_ctrl.type": "fixed", "trainer": {}}
    (tmp_path / "config.yaml").write_text("a: [")
    assert run.config == {}
