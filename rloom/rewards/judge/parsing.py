"""The score in a judge's answer. Anything but exactly one score within the range is a failure, never a guess.

An answer that is judged may hold a score, and the judge may quote it. So what counts is at the end of the judge's text
and complete: one JSON object, a line `Score: 7`, for several answers one line each, or a number that is the whole text.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

EXCERPT = 120
NUMBER = r"-?[0-9]+(?:\.[0-9]+)?"
LABEL = r"(?:(?:final |overall )?score|rating|评分|得分|分数|打分)"
THINKING = re.compile(r"<(/?)think(?:ing)?>", re.I)
FENCE = re.compile(r"```(?:json)?[ \t]*\n([^`]*)\n[ \t]*```", re.I)
BEGINS_OBJECT = re.compile(r'\{\s*"')
MOST_BRACES = 1000
LONGEST_OBJECT = 100_000  # characters of an object that is not the whole text
LONGEST_FENCE = 100  # characters, with the spaces after it
LONGEST_LINE = 200  # characters of a line with a score
# what precedes an object on its line: nothing, or words such as "My verdict:"; a number may be the judge's own score
LEADS_TO_OBJECT = re.compile(r"(?:\A|\n)(?:[^\n0-9{}\"]*[:：][*_]*)?[ \t]*\Z")
OBJECT_SCORE = re.compile(r'"score"\s*:\s*"?([0-9.-]+)')
OPENS_FENCE = re.compile(r"```(?:json)?\s*\Z", re.I)
EMPHASIS = re.compile(r"(\*{1,3}|_{1,3})([^*_]+)\1")
SPLIT_NUMBER = re.compile(r"[0-9.,][*_]+[0-9.,]")  # without the marks it would be another number
BULLET = re.compile(r"\A(?:[-*•]|#{1,6})\s+")
# of a plain_line, whose spaces are single: a pattern with several \s* would take cubic time
VALUE = re.compile(rf"({NUMBER}) ?分? ?((?:/|out of\b) ?{NUMBER}|[(（][^()（）]*[)）])? ?分?[.。]?", re.I)
SCORE_LINE = re.compile(rf"{LABEL} ?([(（][^()（）]*[)）])? ?[:：=] ?(.+)", re.I)
NUMBERED_LINE = re.compile(
    rf"(?:answer|response|回答|答案)? ?[\[(（#]?([0-9]{{1,6}})[\])）]?(?: ?[:：=] ?|[.)、] )(?:{LABEL} ?[:：=] ?)?(.+)",
    re.I,
)
SCALE = re.compile(rf"(?:(?:/|out of\b)|(?:from )?({NUMBER}) ?(?:-|–|~|～|to\b|至|到)) ?({NUMBER})", re.I)
DECODER = json.JSONDecoder(strict=False)  # a judge may write line breaks into its strings


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
    """From a JSON object with `score`, a last line such as "Score: 7" or "评分：7/10", or a text that is a number."""
    found = object_or_lines(text)
    if isinstance(found, dict):
        return Verdict((within(json_number(found, "score", text), allowed, text),), words(found))
    last = [plain_line(BULLET.sub("", line.strip(), count=1)) for line in found[-2:]]
    if len(last) == 1 and VALUE.fullmatch(last[0]):
        return Verdict((within(stated_number(last[0], allowed, text), allowed, text),), "")
    scores = [score_line(line, allowed, text) for line in last]
    if not scores or scores[-1] is None:
        raise Malformed(f"no score at the end of the text, in the answer {excerpt(text)}")
    if scores[0] not in (None, scores[-1]) or any(map(OBJECT_SCORE.search, found)):
        raise Malformed(f"several scores in the answer {excerpt(text)}")
    return Verdict((within(scores[-1], allowed, text),), "")


def parse_group(text: str, allowed: Range, answers: int) -> Verdict:
    """From a JSON object with `scores`, a list of {answer, score}, or from last lines such as "Answer 2: 7". Each
    answer must be there once."""
    found = object_or_lines(text)
    if isinstance(found, dict):
        entries, reason = list(json_entries(found, text)), words(found)
    else:
        entries, reason = last_numbered_lines(found[-answers - 1 :], allowed, text), ""
    numbers = sorted(number for number, _ in entries)
    if numbers != list(range(1, answers + 1)):
        raise Malformed(f"scores of answers {numbers[:EXCERPT]} instead of 1 to {answers} in {excerpt(text)}")
    return Verdict(tuple(within(score, allowed, text) for _, score in sorted(entries)), reason)


def object_or_lines(text: str) -> dict[str, Any] | list[str]:
    """The JSON object with which the answer ends, or else its lines, without empty ones."""
    body = text.strip().removeprefix("\ufeff")
    if (whole := object_at_end(body)) and not whole.before:  # structured output: tags within its strings are text
        return json_object(whole.json, text)
    body = after_thinking(body)
    last = object_at_end(body)
    if THINKING.search(body if last is None else last.before):
        raise Malformed(f"the thinking is not finished in the answer {excerpt(text)}")
    if last is None:
        if body.startswith("{"):
            raise Malformed(f"the answer is not valid JSON: {excerpt(text)}")
        fenced = FENCE.fullmatch(body)
        lines = (fenced.group(1) if fenced else body).split("\n")
        return [line for line in lines if line.strip()]
    found, other = json_object(last.json, text), object_at_end(last.before.rstrip(" \t\r\n,;"))
    if other is not None and json_object(other.json, text) != found:
        raise Malformed(f"several JSON objects at the end of the answer {excerpt(text)}")
    if set(OBJECT_SCORE.findall(last.before)) - set(OBJECT_SCORE.findall(last.json)):
        raise Malformed(f"several JSON objects with scores in the answer {excerpt(text)}")
    if any(SCORE_LINE.fullmatch(plain_line(line)) for line in last.before.split("\n")):
        raise Malformed(f"a line with a score and a JSON object in the answer {excerpt(text)}")
    return found


def after_thinking(body: str) -> str:
    """After the last end of a reasoning model's thinking: an earlier tag may be a quotation within it."""
    ends = [match.end() for match in THINKING.finditer(body) if match.group(1)]
    return body[ends[-1] :].strip() if ends else body


class LastObject(NamedTuple):
    before: str  # what precedes it
    json: str


def object_at_end(body: str) -> LastObject | None:
    """The JSON object with which the text ends, also one within a code fence. Within a sentence it may be a quotation.
    There is at most one: what begins within a string of another object has an odd number of quotes."""
    fenced = body.endswith("```")
    inner = body[:-3].rstrip() if fenced else body
    start = start_of_object(inner) if inner.endswith("}") else None
    if start is None:
        return None
    opens = OPENS_FENCE.search(inner[max(0, start - LONGEST_FENCE) : start])
    if bool(opens) != fenced or not (opens or LEADS_TO_OBJECT.search(inner[max(0, start - LONGEST_LINE) : start])):
        return None
    return LastObject(inner[: start - len(opens.group())].strip() if opens else inner[:start].strip(), inner[start:])


def start_of_object(body: str) -> int | None:
    """Tried are the beginning of the text, and a limited number of braces before its end: a failed attempt takes the
    time of all the text that it is given."""
    if body.startswith("{") and ends_in_object(body, 0):
        return 0
    tail = body[-LONGEST_OBJECT:]
    begins = [match.start() for match in BEGINS_OBJECT.finditer(tail)]
    found = next((start for start in begins[: -MOST_BRACES - 1 : -1] if ends_in_object(tail, start)), None)
    return None if found is None else len(body) - len(tail) + found


def ends_in_object(body: str, start: int) -> bool:
    try:
        return DECODER.raw_decode(body, start)[1] == len(body)
    except (ValueError, RecursionError):
        return False


def json_object(written: str, text: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if repr(found.setdefault(name, value)) != repr(value):
                raise Malformed(f"a name has two values in the JSON {excerpt(text)}")
        return found

    try:
        found = json.loads(written, object_pairs_hook=unique, strict=False)
    except RecursionError as error:
        raise Malformed(f"the JSON is nested too deeply in the answer {excerpt(text)}") from error
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


def plain_line(line: str) -> str:
    """With single spaces, and without pairs of Markdown's marks of emphasis, unless digits would be joined."""
    line = " ".join(line.split())
    if len(line) > LONGEST_LINE or SPLIT_NUMBER.search(line):
        return line
    return EMPHASIS.sub(r"\2", EMPHASIS.sub(r"\2", line))


def score_line(line: str, allowed: Range, text: str) -> float | None:
    """None: it is not a line `Score: 7`."""
    match = SCORE_LINE.fullmatch(line)
    if match is None or not VALUE.fullmatch(match.group(2)):
        return None
    check_scale(match.group(1), allowed, text)
    return stated_number(match.group(2), allowed, text)


def last_numbered_lines(lines: list[str], allowed: Range, text: str) -> list[tuple[int, float]]:
    """The lines `Answer 2: 7` with which the text ends. One more than there are answers may be a quotation."""
    entries: list[tuple[int, float]] = []
    for line in reversed(lines):
        match = NUMBERED_LINE.fullmatch(plain_line(BULLET.sub("", line.strip(), count=1)))
        if match is None or not VALUE.fullmatch(match.group(2)):
            break
        entries.append((int(match.group(1)), stated_number(match.group(2), allowed, text)))
    return entries


def stated_number(written: str, allowed: Range, text: str) -> float:
    """Of a text that is a VALUE."""
    match = VALUE.fullmatch(written)
    assert match is not None
    check_scale(match.group(2), allowed, text)
    return float(match.group(1))


def check_scale(stated: str | None, allowed: Range, text: str) -> None:
    """A scale that the judge states, such as "/10" or "(1-10)", must be the one it was asked for."""
    if stated is None:
        return
    match = SCALE.fullmatch(stated.strip("()（） "))
    if match is None:
        raise Malformed(f"a score with a comment in the answer {excerpt(text)}")
    low, high = match.groups()
    if float(high) != allowed.high or (low is not None and float(low) != allowed.low):
        raise Malformed(f"another scale than {allowed} in the answer {excerpt(text)}")


def exact_number(written: str, text: str) -> float:
    if not re.fullmatch(NUMBER, written):
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
