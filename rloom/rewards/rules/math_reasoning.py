r"""Short arithmetic in Chinese or English: the answer follows the last marker, or is the last number."""

import re
from collections.abc import Mapping
from typing import Any

from rloom.rewards.rules.boxed import boxed_at
from rloom.rewards.rules.limited import GroundTruthError, evaluated, result
from rloom.rewards.rules.numbers import (
    canonical,
    close,
    first_number,
    last_number,
    numbers_in,
    parse_number,
    plain_notation,
)

_MARKER = re.compile(
    r"答案\s*[：:]|答案是|answer\s*[:：]|answer\s+is\b|####|(?P<boxed>\\boxed\s*(?=\{))", re.IGNORECASE
)
_AROUND = " \t\r\n:：*`\"'“”‘’$.。,，;；!！?？"
_LIST_COMMA = re.compile(r"[,，、;；](?!\d)")  # x = 3, y = 4


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float | str | None]:
    truth = true_answer(data_source, ground_truth)
    compared, fault = evaluated(lambda: _compare(_answer_text(solution_str), truth))
    answer, correct = compared or (None, False)
    return result(correct, answer, fault)


def true_answer(data_source: str, ground_truth: Any) -> str:
    truth = "" if ground_truth is None else str(ground_truth).strip()
    if not truth:
        raise GroundTruthError(f"ground_truth={ground_truth!r} of a {data_source} row is empty")
    return truth


def final_answer(text: str) -> str | None:
    """The answer, without a ground truth to compare it with: the number after the last equals sign of a calculation if
    there is only one, else the text."""
    answer = _answer_text(text)
    if answer is None:
        return None
    left, _, right = answer.rpartition("=")
    numbers = numbers_in(right)
    return canonical(numbers[0]) if len(numbers) == 1 and not _LIST_COMMA.search(left) else answer


def _answer_text(text: str) -> str | None:
    """The text after the last marker; without a marker, the last number."""
    markers = list(_MARKER.finditer(text))
    if not markers:
        number = last_number(text)
        return None if number is None else canonical(number)
    last = markers[-1]
    if last["boxed"] is not None:
        return boxed_at(text, last.end())
    lines = (line.strip(_AROUND) for line in text[last.end() :].splitlines())
    return next((line for line in lines if line), None)


def _compare(answer: str | None, truth: str) -> tuple[str | None, bool]:
    """The parsed answer and whether it is correct. Compared as numbers if the ground truth is one."""
    if answer is None:
        return None, False
    expected = parse_number(truth)
    if expected is None:
        return answer, _normalised(answer) == _normalised(truth)
    number = parse_number(answer)
    if number is None:
        number = first_number(answer.rpartition("=")[2])  # `15 + 27 = 42`, `42 apples`, `小明有 42 个`
    if number is None:
        return answer, False
    return canonical(number), close(number, expected)


def _normalised(text: str) -> str:
    return "".join(plain_notation(text).casefold().split()).strip(_AROUND)
