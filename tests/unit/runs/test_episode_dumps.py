"""Dumps of answers of several turns: their columns, what is read of them, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom.batch import Batch
from rloom.episodes.record import episode_metrics
from rloom.errors import DataError
from rloom.runs.dumps.episodes import LONGEST_TEXT, episode_text, read_episode
from rloom.runs.dumps.index import EPISODE_SCHEMA, SCHEMA
from rloom.runs.dumps.reader import Dumps
from rloom.runs.dumps.writer import DumpWriter, validation_table
from rloom.types import EpisodeStep, EpisodeSummary, Score, ToolCall
from tests.unit.runs import test_dumps
from tests.view_episodes import CALLS, MANY, PROMPT, encoded, trajectories, trajectories_of, write_episode_run


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Dumps:
    return Dumps(write_episode_run(tmp_path_factory.mktemp("runs") / "episodes"))


def test_an_episode_is_one_answer_with_one_row_for_each_branch(dumps: Dumps) -> None:
    first, many, _ = dumps.prompts("train", 1)
    assert (first.answers, first.failed, first.mean, many.answers) == (3, 1, 0.375, 1)
    assert [answer.branch for answer in dumps.answers("train", 1, 0)] == [0, 0, 1, 0]
    assert [len(texts) for texts in dumps.texts("train", 1).values()] == [3, 1, 12]
    assert dumps.history("train", 0)[0].answers == 3


def test_steps_have_their_tokens_texts_calls_and_rewards(dumps: Dumps) -> None:
    answer = dumps.answers("train", 1, 0)[0]
    assert answer.episode is not None and answer.pieces is not None
    assert (answer.episode["ending"], answer.episode["reward"], answer.episode["origin"]) == ("done", 0.75, "prompt")
    prompt, *steps = answer.episode["steps"]
    assert (prompt["start"], prompt["stop"], prompt["messages"]) == (0, 0, [["user", PROMPT]])
    texts = ["".join(piece.text for piece in answer.pieces[one["start"] : one["stop"]]) for one in steps]
    assert texts == ["8", "too low", "12?", "no", "I say 12."]
    assert [one["reward"] for one in steps] == [0.25, None, None, None, 0.5]
    assert steps[0]["calls"][0] == {
        "name": "check", "arguments": '{"number": 8}', "result": "too low", "seconds": 0.25, "error": None,
    }  # fmt: skip
    assert steps[0]["calls"][1]["error"] == CALLS[1].error
    assert [piece.masked for piece in answer.pieces[steps[1]["start"] : steps[1]["stop"]]] == [True] * len(
        encoded("too low")
    )


def test_a_further_branch_says_what_began_it_and_a_failure_why(dumps: Dumps) -> None:
    _, one, other, failed = dumps.answers("validation", 0, 0)
    assert one.episode is not None and other.episode is not None and failed.episode is not None
    assert (one.episode["origin"], other.episode["origin"]) == ("prompt", "template")
    assert failed.episode["failure"] == "ValueError: no such move" and failed.turns == [] and failed.pieces == []


def test_a_dump_of_single_turns_has_the_columns_that_it_had(tmp_path: Path) -> None:
    assert validation_table(test_dumps.trajectories()).schema.equals(SCHEMA)
    assert validation_table(trajectories()).schema.equals(EPISODE_SCHEMA)


def test_long_texts_are_cut_and_tokens_are_whole() -> None:
    steps = (
        EpisodeStep("prompt", 0, 1, (("user", "p"),)),
        EpisodeStep("policy", 1, 3, (("assistant", "x" * 50_000),), True, calls=(ToolCall("t", "a", "y" * 50_000),)),
    )
    [found] = trajectories_of(0, EpisodeSummary("done", (steps,), ("prompt",)), [[1, 2, 3]], Score(1.0))
    _, turn = (read_episode(episode_text(found) or "", 2) or {})["steps"]
    assert turn["messages"][0][1] == "x" * LONGEST_TEXT + " … (+30,000)"
    assert turn["calls"][0]["result"] == "y" * LONGEST_TEXT + " … (+30,000)"
    many = tuple(EpisodeStep("environment", 3, 3, (("tool", "z" * 50_000),)) for _ in range(1000))
    [found] = trajectories_of(0, EpisodeSummary("done", (steps + many,), ("prompt",)), [[1, 2, 3]], Score(1.0))
    text = episode_text(found) or ""
    assert len(text) < 2_500_000 and len((read_episode(text, 2) or {})["steps"]) == 1002


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("ending",), 3),
        (("origin",), "nowhere"),
        (("steps",), {}),
        (("steps", 1, "stop"), 10**6),
        (("steps", 1, "start"), -1),
        (("steps", 1, "messages"), [["assistant"]]),
        (("steps", 1, "messages"), [["assistant", 3]]),
        (("steps", 1, "source"), ["policy"]),
        (("steps", 1, "calls", 0, "error"), 1),
        (("steps", 1, "calls", 0), "check"),
        (("steps", 1, "reward"), "1"),
    ],
)
def test_a_value_that_no_run_writes_is_refused(place: tuple[str | int, ...], value: object) -> None:
    found = json.loads(episode_text(trajectories()[0]) or "")
    tokens = found["steps"][-1]["stop"]
    assert read_episode(json.dumps(found), tokens) == found and read_episode(json.dumps(found), tokens + 1) is None
    at = found
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = value
    assert read_episode(json.dumps(found), tokens) is None


def test_a_damaged_episode_makes_no_answers_of_the_step(tmp_path: Path) -> None:
    out = DumpWriter(tmp_path / "rollouts", limit=float("inf"), seed=1, report=pytest.fail)
    out.write("train", 1, partial(validation_table, trajectories()))
    out.close()
    file = tmp_path / "rollouts" / "train" / "1.parquet"
    table = pq.ParquetFile(file).read()
    broken = pa.array(["{"] * len(table), pa.string())
    pq.write_table(table.set_column(table.column_names.index("episode"), "episode", broken), file)
    with pytest.raises(DataError, match="no valid episode"):
        Dumps(tmp_path).answers("train", 1, 0)


def test_metrics_count_an_episode_once() -> None:
    found = [one for one in trajectories() if one.group == 0]
    metrics = episode_metrics(found)
    assert (metrics["episode/turns/mean"], metrics["episode/turns/max"]) == (5 / 3, 3.0)  # 3, 2 and 0 turns
    assert (metrics["episode/branches"], metrics["episode/rewritten_past"]) == (4 / 3, 1 / 3)
    assert metrics["episode/ended/done"] == metrics["episode/ended/turn_limit"] == 1 / 3
    assert metrics["episode/ended/environment_failed"] == 1 / 3 and metrics["episode/ended/environment_timeout"] == 0
    assert metrics["episode/failed"] == 1 / 3
    assert (metrics["tool/calls"], metrics["tool/errors"], metrics["tool/timeouts"]) == (2 / 3, 0.5, 0.0)
    assert (metrics["tool/unused"], metrics["tool/seconds/mean"]) == (2 / 3, 0.125)
    assert metrics["episode/added_tokens"] == pytest.approx(len(encoded("too low") + encoded("no")) / 3)
    assert metrics["episode/repeated_tokens"] == pytest.approx(len(encoded(f"{PROMPT}7, then: +")) / 3)
    assert "tool/calls" not in episode_metrics([one for one in trajectories() if one.group == 1])
    assert episode_metrics(test_dumps.trajectories()) == {}


def test_the_batch_of_a_hundred_turns_has_their_masks() -> None:
    [one] = [one for one in trajectories() if one.group == 1]
    assert len(one.turns) == MANY and int(Batch.pack([one]).mask_T.sum()) == sum(t.stop - t.start for t in one.turns)
