"""GSM8K: the number after `####`; in flexible mode, the last number of the answer."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rloom.rewards.rules.numbers import canonical, close, leading_number, numbers_in, parse_number

METHODS = ("strict", "flexible")
ANSWER_MARK = "####"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: str = "strict",
) -> dict[str, float | str | None]:
    truth = true_answer(data_source, ground_truth)
    answer = answer_of(solution_str, method)
    score = float(answer is not None and close(answer, truth))
    return {"score": score, "acc": score, "pred": None if answer is None else canonical(answer)}


def true_answer(data_source: str, ground_truth: Any) -> Fraction:
    truth = parse_number(str(ground_truth))
    if truth is None:
        raise ValueError(f"ground_truth={ground_truth!r} of a {data_source} row is not a number")
    return truth


def answer_of(solution: str, method: str) -> Fraction | None:
    if method not in METHODS:
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    return _after_hashes(solution) if method == "strict" else _last_number(solution)


def _after_hashes(text: str) -> Fraction | None:
    before, marker, after = text.rpartition(ANSWER_MARK)
    if not after.partition("\n")[0].strip() and ANSWER_MARK in before.rpartition("\n")[2]:
        after = before.rpartition(ANSWER_MARK)[2]  # `#### 18 ####`: the second mark closes the line
    return leading_number(after) if marker else None


def _last_number(text: str) -> Fraction | None:
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None
