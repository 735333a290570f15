"""The score in a judge's answer. Anything but exactly one score within the range is a failure, never a guess."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

EXCERPT = 120
NUMBER = r"[-+]?\d[\d.,+\-–~～eE]*"  # as written; `exact_number` accepts only 7, -7 and 7.5
LABEL = r"(?:(?<![A-Za-z_])(?:score|rating)|评分|得分|分数|打分|总分)"
MARKS = r"[\"'*_`]*"
THINKING = re.compile(r"\A\s*<think>.*?</think>", re.S)
FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.S)
ALONE = re.compile(rf"[\s\"'*_`]*({NUMBER})\s*分?[\s\"'*_`.。]*")
LABELLED = re.compile(rf"{LABEL}(?:\s*[（(][^()（）\n]*[)）])?{MARKS}\s*[:：=][\s\"'*_`]*({NUMBER})", re.I)
OUT_OF = re.compile(rf"(?<![\w.,/-])({NUMBER})\s*(?:/|out\s+of\b)\s*({NUMBER})", re.I)
THEN_SCALE = re.compile(rf"{MARKS}\s*(?:/|(?:out\s+)?of\b)\s*({NUMBER})", re.I)
THEN_ANOTHER = re.compile(rf"{MARKS}\s*(?:to|or|and|或|至|到|-|–|~|～)\s*\d", re.I)
NUMBERED = re.compile(
    rf"\W*(?:answer|response|回答|答案)?\s*[\[(（]?(\d+)[\])）]?(?:\s*[:：]\s*|[.)]\s+)(?:{LABEL}\s*[:：=])?[\s\"'*_`]*"
    rf"({NUMBER})({MARKS}\s*(?:(?:/|out\s+of\b)\s*\d+)?[\s\"'*_`.。分]*)(?:[,;(，；（—–-]\s*\D.*)?",
    re.I,
)


class Malformed(Exception):
    """The answer has no score that can be used, and why."""


@dataclass(frozen=True)
class Verdict:
    scores: tuple[float, ...]  # one for each answer, within the range
    reason: str  # the judge's own words; empty in a plain text


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    def scaled(self, score: float) -> float:
        """From 0 to 1."""
        return (score - self.low) / (self.high - self.low)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


def parse_one(text: str, allowed: Range) -> Verdict:
    """From JSON with `score`, or from text such as "Score: 7", "评分：7", "7/10" or "7"."""
    body = bare(text)
    if body.startswith("{"):
        found = json_object(body, text)
        return Verdict((within(json_number(found, "score", text), allowed, text),), words(found))
    scores = sorted(set(scores_in_text(body, allowed, text)))
    if not scores:
        raise Malformed(f"no score in the answer {excerpt(text)}")
    if len(scores) > 1:
        raise Malformed(f"several scores in the answer {excerpt(text)}")
    return Verdict((within(scores[0], allowed, text),), "")


def parse_group(text: str, allowed: Range, answers: int) -> Verdict:
    """From JSON with `scores`, a list of {answer, score}, or from lines such as "Answer 2: 7". All must be there."""
    body = bare(text)
    if body.startswith("{"):
        found = json_object(body, text)
        entries, reason = list(json_entries(found, text)), words(found)
    else:
        entries, reason = list(numbered_lines(body, allowed, text)), ""
    numbers = sorted(number for number, _ in entries)
    if numbers != list(range(1, answers + 1)):
        raise Malformed(f"scores of answers {numbers} instead of 1 to {answers} in {excerpt(text)}")
    return Verdict(tuple(within(score, allowed, text) for _, score in sorted(entries)), reason)


def bare(text: str) -> str:
    """Without the thinking of a reasoning model and without a code fence around the whole."""
    body = THINKING.sub("", text).strip()
    fenced = FENCE.match(body)
    return fenced.group(1).strip() if fenced else body


def json_object(body: str, text: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise Malformed(f"a name occurs twice in the JSON {excerpt(text)}")
        return dict(pairs)

    try:
        found = json.loads(body, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the answer is not valid JSON: {excerpt(text)}") from error
    assert isinstance(found, dict)  # it begins with a brace
    return found


def json_number(found: dict[str, Any], name: str, text: str) -> float:
    value = found.get(name)
    if isinstance(value, str):
        return exact_number(value.strip(), text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed(f"no number as {name!r} in the answer {excerpt(text)}")
    return value


def json_entries(found: dict[str, Any], text: str) -> Iterator[tuple[int, float]]:
    listed = found.get("scores")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise Malformed(f"no list 'scores' in the answer {excerpt(text)}")
    for entry in listed:
        number = json_number(entry, "answer", text)
        if isinstance(number, float) and not number.is_integer():
            raise Malformed(f"an answer has the number {number:g} in {excerpt(text)}")
        yield int(number), json_number(entry, "score", text)


def scores_in_text(body: str, allowed: Range, text: str) -> Iterator[float]:
    alone = ALONE.fullmatch(body)
    if alone:
        yield exact_number(alone.group(1), text)
        return
    for match in LABELLED.finditer(body):
        yield checked_number(match.group(1), body[match.end() :], allowed, text)
    for match in OUT_OF.finditer(body):
        if match.group(2).rstrip(".,") == f"{allowed.high:g}":  # other fractions are part of the judge's argument
            yield exact_number(match.group(1), text)


def numbered_lines(body: str, allowed: Range, text: str) -> Iterator[tuple[int, float]]:
    for line in body.splitlines():
        match = NUMBERED.fullmatch(line)
        if match:
            number, written, rest = match.groups()
            yield int(number), checked_number(written, rest, allowed, text)


def checked_number(written: str, rest: str, allowed: Range, text: str) -> float:
    """`rest`: what follows the number. A second number or another scale makes it ambiguous."""
    scale = THEN_SCALE.match(rest)
    if scale and exact_number(scale.group(1), text) != allowed.high:
        raise Malformed(f"another scale than {allowed} in the answer {excerpt(text)}")
    if THEN_ANOTHER.match(rest):
        raise Malformed(f"several scores in the answer {excerpt(text)}")
    return exact_number(written, text)


def exact_number(written: str, text: str) -> float:
    written = written.rstrip(".,")
    if not re.fullmatch(r"-?\d+(\.\d+)?", written):
        raise Malformed(f"{written!r} is not a score in the answer {excerpt(text)}")
    return float(written)


def within(score: float, allowed: Range, text: str) -> float:
    if not allowed.low <= score <= allowed.high:
        raise Malformed(f"the score is not within {allowed} in the answer {excerpt(text)}")
    return float(score)


def words(found: dict[str, Any]) -> str:
    reason = found.get("reason")
    return reason if isinstance(reason, str) else ""


def excerpt(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…")
