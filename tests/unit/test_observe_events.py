"""The events of a run: appended line by line, and read as they are in effect after a resume."""

import json
from itertools import pairwise
from pathlib import Path

import torch
from algos_samples import batch_of

from rloom.batch import TrainBatch, Trajectory, Turn
from rloom.observe.events import EVENTS_FILE, EventLog, metrics_by_step, read_events, rollout_fields
from rloom.observe.runlog import RunLog
from rloom.types import Prompt, Score


def names(file: Path) -> list[tuple[str, object]]:
    return [(event["event"], event.get("step")) for event in read_events(file)]


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
    assert metrics_by_step(read_events(file)) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 20.0}]


def test_a_line_that_a_crash_cut_short_is_skipped_and_the_next_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / EVENTS_FILE
    EventLog(file).write("run", step=0)
    with file.open("a") as out:
        out.write('{"time": 1, "event": "st')
    EventLog(file).write("step", step=1, metrics={})
    assert names(file) == [("run", 0), ("step", 1)]


def test_a_run_log_writes_stages_with_their_begin_and_end_and_how_it_ended(tmp_path: Path) -> None:
    try:
        with RunLog.open(tmp_path, loggers=["file"], project="p", experiment="e", config={}) as log:
            log.truncate_after(-1)
            log.begin_step(1)
            with log.span("step"), log.span("gen"):
                pass
            log.step(1, {"critic/score/mean": 0.5})
            log.validation(1, {"val-core/a/acc/mean@1": 0.25})
            raise TimeoutError
    except TimeoutError:
        pass
    events = read_events(tmp_path / EVENTS_FILE)
    stages = [(event["event"], event.get("stage")) for event in events]
    assert stages[:5] == [
        ("run", None), ("stage_begin", "step"), ("stage_begin", "gen"), ("stage_end", "gen"), ("stage_end", "step")
    ]  # fmt: skip
    assert [event["event"] for event in events[5:]] == ["step", "validation", "end"]
    assert events[5]["metrics"]["critic/score/mean"] == 0.5 and events[6]["metrics"]["val-core/a/acc/mean@1"] == 0.25
    assert events[-1]["status"] == "TimeoutError"
    assert all(before["time"] <= after["time"] for before, after in pairwise(events))


def test_a_rollout_event_has_group_version_tokens_log_probs_and_advantages(tmp_path: Path) -> None:
    batch = batch_of([".ww", ".w"], [1.0, None])
    train_batch = TrainBatch(
        **vars(batch),
        advantages_T=torch.tensor([0.0, 2.0, 3.0, 0.0, -1.0]),
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )
    prompt = Prompt(index=0, messages=(), text="1 + 1?", tokens=(5,), data_source="a")
    first = Trajectory(
        prompt, 4, torch.tensor([5, 6, 7]), torch.tensor([0, -0.5, -0.25]), (Turn(1, 3, version=2),), True, Score(1.0)
    )
    second = Trajectory(
        prompt, 4, torch.tensor([5, 8]), torch.tensor([0, -1.0]), (Turn(1, 2, version=2),), False, Score.failed("late")
    )
    one, other = rollout_fields([first, second], train_batch)
    assert (one["group"], one["version"], one["tokens"], one["logprobs"]) == (4, 2, [6, 7], [-0.5, -0.25])
    assert (one["advantages"], one["score"], one["finished"]) == ([2.0, 3.0], 1.0, True)
    assert (other["advantages"], other["score"], other["reason"], other["finished"]) == ([-1.0], None, "late", False)
    EventLog(tmp_path / EVENTS_FILE).write("rollout", step=3, **one)
    assert json.loads((tmp_path / EVENTS_FILE).read_text())["prompt"] == "1 + 1?"
