"""Replies that no judge should send, in the formats of the four providers: one call fails, and the run goes on."""

import json
import logging
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rloom import cli
from rloom.errors import RewardError
from rloom.rewards.judge import client as judge_client
from rloom.types import Score
from tests.judge_server import (
    KEY,
    Body,
    JudgeServer,
    Received,
    claude_wrap,
    openai_wrap,
    serving,
)
from tests.judging import TYPES, judge_for, scores_of, worth

WRAPS: Mapping[str, Callable[[str], Body]] = {**dict.fromkeys(TYPES, openai_wrap), "claude": claude_wrap}
TEXTS: Mapping[str, tuple[Any, ...]] = {  # where the text is in a reply
    **dict.fromkeys(TYPES, ("choices", 0, "message", "content")),
    "claude": ("content", 0, "text"),
}
COUNTS = {
    **dict.fromkeys(TYPES, ("usage", "prompt_tokens", "completion_tokens")),
    "claude": ("usage", "input_tokens", "output_tokens"),
}
WORDS = "Well done.\nScore: 7"
DEEP = json.loads("[" * 500 + "]" * 500)
CONTENTS = (7, 1e300, True, {"a": 1}, [["x"]], [{"type": "text", "text": 5}], [None], [{}], DEEP, None, "")
CONTAINERS = ("abc", 5, {}, [5], [None], [[]], ["x"], None, True, [{}], [{"message": 5, "content": 5, "type": "text"}])
BODIES = (
    *(b"\xff\xfe{", b"[" * 100_000, b'{"a":' * 100_000, b"null", b"7", b'"x"', b"[]", b"", b"NaN", b"1e400", b"<html>"),
    b'{"choices": [{"message": {"content": Infinity}}], "content": [{"type": "text", "text": NaN}]}',
)
ERRORS: tuple[Any, ...] = ({"error": 5}, {"error": {"message": ["x"]}}, {"error": {"message": "\ud800\x1b[2J"}}, [], 7)


@dataclass
class OddServer(JudgeServer):
    replies: list[tuple[int, Any]] = field(default_factory=list)  # one after the other; the last of them stays

    def result(self, request: Received, fault: str) -> tuple[int, Body | bytes]:
        return self.replies[min(len(self.received), len(self.replies)) - 1]


def with_value(type: str, path: tuple[Any, ...], value: Any) -> tuple[int, Body]:
    body = found = WRAPS[type](WORDS)
    for name in path[:-1]:
        found = found[name]
    found[path[-1]] = value
    return 200, body


def scored(type: str, replies: list[tuple[int, Any]], **keys: Any) -> tuple[list[Score], Mapping[str, float]]:
    """The scores of one sample for each reply."""
    with serving(OddServer, replies=replies) as server:
        reward = judge_for(server, type, concurrency=1, **{"max_retries": 0, **keys})
        samples = tuple(worth(3, prompt=f"Question {number}") for number in range(len(replies)))
        [scores] = scores_of(reward, [samples])
    return scores, reward.metrics()


@pytest.mark.parametrize("type", TYPES)
def test_a_reply_of_other_types_fails_its_call_alone(type: str) -> None:
    container = TEXTS[type][: TEXTS[type].index(0)]
    replies: list[tuple[int, Any]] = [with_value(type, TEXTS[type], content) for content in CONTENTS]
    replies += [with_value(type, container, value) for value in CONTAINERS]
    replies += [(200, body) for body in BODIES]
    replies += [(status, error) for status in (429, 500) for error in (*ERRORS, b"\xff")]
    replies.append((200, WRAPS[type](WORDS)))
    *odd, good = (found := scored(type, replies))[0]
    assert good.value == 6 / 9
    assert [score.value for score in odd] == [None] * len(odd)
    assert all(score.reason and score.reason.isprintable() for score in odd)  # one line, without control characters
    assert found[1]["failed"] == len(odd) and found[1]["requests"] == len(replies)


@pytest.mark.parametrize("type", ["openai", "dashscope"])
def test_text_in_parts_is_joined(type: str) -> None:
    parts = [{"type": "text", "text": "Well done.\nScore:"}, {"type": "text", "text": " 7"}]
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 1"}]}
    replies = [with_value(type, TEXTS[type], parts)]
    replies += [with_value(type, TEXTS[type], [thinking, *parts])]
    assert {score.value for score in scored(type, replies)[0]} == {6 / 9}


def test_claude_is_read_from_its_tool_and_not_from_the_words_before_it() -> None:
    tool = {"type": "tool_use", "id": "t", "name": "submit_verdict", "input": {"reason": "", "score": 2}}
    words = {"type": "text", "text": 'He wrote {"score": 10}'}
    other = {**tool, "input": {"score": 9}}
    replies = [with_value("claude", ("content",), [words, *tools]) for tools in ([tool], [tool, other])]
    once, twice = scored("claude", replies)[0]
    assert once.value == 1 / 9 and "several JSON objects" in str(twice.reason)


@pytest.mark.parametrize("type", TYPES)
def test_halves_of_surrogate_pairs_are_replaced_before_anything_is_written(type: str, tmp_path: Path) -> None:
    raw, escaped = '{"reason": "a\ud800b \ud83d\ude00", "score": 7}', r'{"reason": "a\ud800b \ud83d\ude00", "score": 7}'
    scores, _ = scored(type, [(200, WRAPS[type](words)) for words in (raw, escaped)], cache_dir=str(tmp_path))
    assert scores == [Score(6 / 9, detail="7 of 1 to 10: a\ufffdb \U0001f600")] * 2
    with sqlite3.connect(tmp_path / "answers.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM answers").fetchone() == (2,)


@pytest.mark.parametrize("type", TYPES)
def test_counts_that_cannot_be_right_are_estimated_and_never_lower_the_sum(
    type: str, caplog: pytest.LogCaptureFixture
) -> None:
    section, given, made = COUNTS[type]
    replies = []
    for count in (-5, 10**30, 0):
        _, body = with_value(type, (section, given), count)
        body[section][made] = count
        replies.append((200, body))
    _, body = with_value(type, (section,), None)
    replies.append((200, {name: value for name, value in body.items() if name != section}))
    keys = {"system_prompt": "S", "scoring_prompt": "评 {prompt} {response}", "input_price": 1e6, "output_price": 1e6}
    with caplog.at_level(logging.WARNING, logger="rloom"):
        scores, metrics = scored(type, replies, **keys)
    assert [score.value for score in scores] == [6 / 9] * 4
    # a token for 2 bytes of: S, the 3 bytes of 评, two spaces, "Question 0", the 19 bytes of the answer, and the 117
    # that rloom adds, which are 152; and of the 19 bytes of WORDS
    assert metrics["input_tokens"] == 4 * 76 and metrics["output_tokens"] == 4 * 10
    assert metrics["cost"] == metrics["input_tokens"] + metrics["output_tokens"]
    assert caplog.text.count("sends no usable count of tokens") == 1


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("count", ["many", [1], True, 1.5, {}])
def test_counts_of_other_types_do_not_end_the_run(type: str, count: Any) -> None:
    section, given, _ = COUNTS[type]
    replies = [with_value(type, (section, given), count), with_value(type, (section,), count)]
    scores, metrics = scored(type, [*replies, (200, WRAPS[type](WORDS))])
    assert scores[-1].value == 6 / 9 and all(score.ok or score.reason for score in scores)
    assert metrics["input_tokens"] >= 120


def test_tokens_of_thinking_that_only_the_total_has_are_counted() -> None:
    """As Gemini's compatible API counts them."""
    usage = {"prompt_tokens": 21, "completion_tokens": 9, "total_tokens": 81}
    [score], metrics = scored("gemini", [with_value("gemini", ("usage",), usage)])
    assert score.ok and (metrics["input_tokens"], metrics["output_tokens"]) == (21, 60)


def test_a_budget_holds_for_a_server_that_does_not_count(tmp_path: Path) -> None:
    body = {name: value for name, value in openai_wrap(WORDS).items() if name != "usage"}
    prices = {"input_price": 1e6, "output_price": 1e6, "budget": 500.0, "cache_dir": str(tmp_path)}
    with serving(OddServer, replies=[(200, body)]) as server:
        reward = judge_for(server, concurrency=1, system_prompt="S", scoring_prompt="{response}", **prices)
        with pytest.raises(RewardError, match="budget=500: spent"):
            scores_of(reward, [tuple(worth(3 + number / 100) for number in range(20))])
        # 1 + 22 + 121 bytes and 19 bytes, which are 72 and 10 tokens a call; the first answer has 3 bytes less
        assert len(server.received) == 7


def test_a_very_long_answer_fails_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "LONGEST_TEXT", 1000)
    long = (200, openai_wrap("x" * 1000 + "\nScore: 7"))
    error = (500, {"error": {"message": "x" * 100_000 + f" {KEY}"}})
    (score, failed, good), _ = scored("openai", [long, error, (200, openai_wrap(WORDS))])
    assert score.reason == "openai judge: the answer has 1,009 characters, and 1,000 are allowed"
    assert failed.reason == "openai judge: HTTP 500:" and good.value == 6 / 9


def test_an_error_that_was_not_foreseen_fails_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(text: str, *_: Any) -> Any:
        monkeypatch.undo()
        raise KeyError("unforeseen")

    monkeypatch.setattr("rloom.rewards.judge.judge.parse_one", fails_once)
    bad, good = scored("openai", [(200, openai_wrap(WORDS))] * 2)[0]
    assert bad.reason == "openai judge: the answer cannot be read: KeyError: 'unforeseen'" and good.value == 6 / 9


def test_try_prints_a_plain_error_for_an_odd_reply(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    replies = [
        with_value("openai", TEXTS["openai"], 7),
        (500, {"error": {"message": "\ud800\x1b[2J"}}),
        with_value("openai", ("usage",), "many"),
        (200, openai_wrap("\ud800\x1b[2J\nScore: 7")),
    ]
    printed = []
    with serving(OddServer, replies=replies) as server:
        keys = ["type=openai", f"base_url={server.base_url('openai')}", "max_retries=0"]
        for _ in replies:
            given = ("--prompt", "p", "--response", "r", *(f"reward_model.api.{key}" for key in keys))
            ended = cli.main(["judge", "try", *given])
            printed.append((ended, capsys.readouterr().out))
    assert [ended for ended, _ in printed] == [1, 1, 0, 0]
    assert "No score: the answer of the API is not usable: its content is of type int" in printed[0][1]
    assert "No score: HTTP 500: \ufffd\ufffd[2J" in printed[1][1]
    assert " out (estimated); " in printed[2][1]
    assert "Answer: \ufffd\ufffd[2J\nScore: 7\nScore: 7, scaled 0.6667" in printed[3][1]
