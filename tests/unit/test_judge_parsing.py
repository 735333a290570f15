"""Scores in the words of a judge: exactly one within the range, or a failure with its reason."""

import pytest

from rloom.rewards.judge.parsing import Malformed, Range, parse_group, parse_one

TEN = Range(1, 10)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"reason": "right", "score": 7}', 7),
        ('{"score": 7.5}', 7.5),
        ('{"score": "7"}', 7),
        ('```json\n{"score": 9}\n```', 9),
        ('My verdict: {"max_score": 10, "score": 7}', 7),
        ("<think>Score: 3? No.</think>\nScore: 8", 8),
        ("7", 7),
        (" **8** ", 8),
        ("9分", 9),
        ("7/10", 7),
        ("I give it 7 out of 10.", 7),
        ("Score: 7", 7),
        ("**Score:** 7/10", 7),
        ("Score (1-10): 7", 7),
        ("Rating = 6.", 6),
        ("评分：7", 7),
        ("综合来看，得分: 8分。", 8),
        ("Half of it, 1/2, is right.\nScore: 5", 5),
        ("Score: 7. To sum up: Score: 7", 7),
        ("1", 1),
        ("10", 10),
    ],
)
def test_a_clear_score_is_read(text: str, score: float) -> None:
    assert parse_one(text, TEN).scores == (score,)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no score"),
        ("A very good answer", "no score"),
        ("maybe 7", "no score"),
        ("It is worth 7 points of the 9 I could give", "no score"),
        ("Score: between 3 and 4", "no score"),
        ("Score: 7 or 8", "several scores"),
        ("Score: 7\nScore: 8", "several scores"),
        ("3/10 for style. Score: 7", "several scores"),
        ("Score: 7-8", "not a score"),
        ("7-8", "not a score"),
        ("Score: 7,5", "not a score"),
        ("Score: 1e1", "not a score"),
        ("Score: 3/5", "another scale"),
        ("Score: 11", "not within 1 to 10"),
        ("0", "not within 1 to 10"),
        ("-3", "not within 1 to 10"),
        ('{"score": 42}', "not within 1 to 10"),
        ('{"score": NaN}', "not within 1 to 10"),
        ('{"score": 1e999}', "not within 1 to 10"),
        ('{"score": 1' + "0" * 400 + "}", "not within 1 to 10"),
        ('{"score": true}', "no number as 'score'"),
        ('{"score": null}', "no number as 'score'"),
        ('{"score": [7]}', "no number as 'score'"),
        ('{"rating": 7}', "no number as 'score'"),
        ('{"score": "seven"}', "not a score"),
        ('{"score": 7, "score": 8}', "twice"),
        ('{"reason": "Score: 7", "sco', "not valid JSON"),
        ("[" * 100_000, "no score"),
        ('{"a":' * 100_000, "not valid JSON"),
    ],
)
def test_anything_else_is_a_failure_and_not_a_zero(text: str, reason: str) -> None:
    with pytest.raises(Malformed, match=reason) as raised:
        parse_one(text, TEN)
    assert len(str(raised.value)) < 250


def test_the_range_is_scaled_linearly() -> None:
    assert [TEN.scaled(score) for score in (1, 5.5, 10)] == [0.0, 0.5, 1.0]
    assert Range(-1, 1).scaled(0.5) == 0.75
    assert parse_one("4/5", Range(0, 5)).scores == (4,)


def test_the_words_of_the_judge_are_kept() -> None:
    assert parse_one('{"reason": "a slip in step 2", "score": 6}', TEN).reason == "a slip in step 2"


@pytest.mark.parametrize(
    "text",
    [
        '{"reason": "r", "scores": [{"answer": 2, "score": 3}, {"answer": 1, "score": 9}]}',
        "Answer 1: 9\nAnswer 2: 3/10",
        "1. 9\n2. 3",
        "[1]: 9\n\n[2]: 3",
        "回答1：9分\n回答2：3分",
        "Answer 1: **9** - complete\nAnswer 2: Score: 3, too short",
    ],
)
def test_the_scores_of_a_group_are_read_by_their_numbers(text: str) -> None:
    assert parse_group(text, TEN, 2).scores == (9, 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"scores": [{"answer": 1, "score": 9}]}', r"\[1\] instead of 1 to 2"),
        ('{"scores": [{"answer": 1, "score": 9}, {"answer": 1, "score": 3}]}', r"\[1, 1\] instead"),
        ('{"scores": [{"answer": 1, "score": 9}, {"answer": 2, "score": 3}, {"answer": 3, "score": 3}]}', "instead"),
        ('{"scores": [{"answer": 0, "score": 9}, {"answer": 1, "score": 3}]}', "instead"),
        ('{"scores": [{"answer": 1.5, "score": 9}, {"answer": 2, "score": 3}]}', "number 1.5"),
        ('{"scores": [{"answer": 1, "score": 9}, {"answer": 2, "score": 0}]}', "not within"),
        ('{"scores": [9, 3]}', "no list 'scores'"),
        ('{"score": 9}', "no list 'scores'"),
        ("Answer 1: 9", "instead"),
        ("1.9\n2.3", "instead"),
        ("Answer 1: 9 of 10 steps hold\nAnswer 2: 3", r"\[2\] instead"),
        ("Answer 1: 7-8\nAnswer 2: 3", "not a score"),
        ("9, 3", "instead"),
    ],
)
def test_a_group_is_complete_or_fails(text: str, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        parse_group(text, TEN, 2)
