"""GSM8K: the number after `####`; in flexible mode, the last number of the answer."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rloom.rewards.rules.limited import GroundTruthError, evaluated, result
from rloom.rewards.rules.numbers import canonical, close, last_number, leading_number, parse_number

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
    truth, find = true_answer(data_source, ground_truth), finder(method)
    answer, fault = evaluated(lambda: find(solution_str))
    if answer is None:
        return result(False, None, fault)
    return result(close(answer, truth), canonical(answer), fault)


def true_answer(data_source: str, ground_truth: Any) -> Fraction:
    truth = parse_number(str(ground_truth))
    if truth is None:
        raise GroundTruthError(f"ground_truth={ground_truth!r} of a {data_source} row is not a number")
    return truth


def finder(method: str) -> Callable[[str], Fraction | None]:
    if method not in METHODS:
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    return _after_hashes if method == "strict" else last_number


def _after_hashes(text: str) -> Fraction | None:
    before, marker, after = text.rpartition(ANSWER_MARK)
    if not after.partition("\n")[0].strip() and ANSWER_MARK in before.rpartition("\n")[2]:
        after = before.rpartition(ANSWER_MARK)[2]  # `#### 18 ####`: the second mark closes the line
    return leading_number(after) if marker else None
