"""The events of a run: appended line by line, and read as they are in effect after a resume."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from rloom.atomic import replace_text
from rloom.runs.records import EVENTS_FILE, EventLog, read_event
from rloom.runs.run_folder import RunFolder
from rloom.runs.runlog import RunLog


def names(file: Path) -> list[tuple[str, object]]:
    return [(event["event"], event.get("step")) for event in RunFolder(file.parent).events]


def test_a_resumed_run_replaces_the_events_of_later_steps_and_deletes_none(tmp_path: Path) -> None:
    file = tmp_path / EVENTS_FILE
    log = EventLog(file)
    log.write("run", step=0)
    for step in (1, 2, 3):
        log.write("step", step=step, metrics={"loss": float(step), "gone": float("nan")})
    EventLog(file).write("run", step=1)
    EventLog(file).write("step", step=2, metrics={"loss": 20.0})
    assert names(file) == [("run", 0), ("step", 1), ("run", 1), ("step", 2)]
    assert len(file.read_text().splitlines()) == 6
    assert RunFolder(tmp_path).metrics == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 20.0}]


def test_events_that_cannot_be_written_are_reported_once_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "later" / EVENTS_FILE
    log = EventLog(file)
    log.write("run", step=0)
    log.write("step", step=1, metrics={})
    assert caplog.messages == [f"{file} cannot be written (No such file or directory): events are missing in it"]
    file.parent.mkdir()
    file.write_text('{"time": 1, "event": "st')  # as far as there was room
    log.write("step", step=2, metrics={})
    assert names(file) == [("step", 2)]


def test_a_line_that_a_crash_cut_short_is_skipped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / EVENTS_FILE
    EventLog(file).write("run", step=0)
    with file.open("a") as out:
        out.write('{"time": 1, "event": "st')
    EventLog(file).write("step", step=1, metrics={})
    assert names(file) == [("run", 0), ("step", 1)]


def test_times_of_generation_are_pairs_in_their_order() -> None:
    event = {"time": 9.0, "event": "generation", "step": 1}
    good = {**event, "spans": [[1.0, 2.0], [2.0, 2.0]]}
    assert read_event(good) == good and read_event({**event, "spans": []}) is not None
    for spans in ([[2.0, 1.0]], [[1.0]], [1.0, 2.0], [["a", "b"]], [[1.0, None]], {}, None):
        assert read_event({**event, "spans": spans}) is None


def test_a_run_log_writes_stages_with_their_begin_and_end_and_how_it_ended(tmp_path: Path) -> None:
    try:
        with RunLog.open(tmp_path, loggers=["file"], project="p", experiment="e", config={}) as log:
            log.truncate_after(-1)
            log.begin_step(1)
            with log.span("step"), log.span("gen"):
                pass
            log.step(1, {"critic/score/mean": 0.5})
            log.validation(1, {"val-core/a/acc/mean@1": 0.25}, {"a": "score"})
            raise TimeoutError
    except TimeoutError:
        pass
    events = RunFolder(tmp_path).events
    stages = [(event["event"], event.get("stage")) for event in events]
    assert stages[:5] == [
        ("run", None), ("stage_begin", "step"), ("stage_begin", "gen"), ("stage_end", "gen"), ("stage_end", "step")
    ]  # fmt: skip
    assert [event["event"] for event in events[5:]] == ["step", "validation", "end"]
    assert events[5]["metrics"]["critic/score/mean"] == 0.5 and events[6]["metrics"]["val-core/a/acc/mean@1"] == 0.25
    assert events[6]["measures"] == RunFolder(tmp_path).measures == {"a": "score"}
    assert events[-1]["status"] == "TimeoutError"
    assert all(before["time"] <= after["time"] for before, after in pairwise(events))


def test_a_planted_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "labels.json", tmp_path / "other"
    other.write_text("mine")
    (tmp_path / f".labels.json.{os.getpid()}.tmp").symlink_to(other)
    replace_text(file, "new")
    assert (file.read_text(), other.read_text(), file.is_symlink()) == ("new", "mine", False)
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".labels.json.guessed.tmp").symlink_to(other)
    with pytest.raises(FileExistsError):
        replace_text(file, "newer")
    assert (file.read_text(), other.read_text()) == ("new", "mine")


def test_a_text_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "a", "\ud800")
    assert list(tmp_path.iterdir()) == []
