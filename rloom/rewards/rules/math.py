r"""MATH and similar data: the last `\boxed` answer, equal to the ground truth as text or mathematically."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rloom.rewards.rules.boxed import boxed_at, last_boxed
from rloom.rewards.rules.expressions import equal_equations, equal_expressions, equal_regions, evaluate, load_library
from rloom.rewards.rules.latex import (
    INEQUALITY,
    as_text,
    at_approximately,
    at_colons,
    at_commas,
    at_equals,
    at_unions,
    based_number,
    enclosed,
    exact_number,
    matrix_rows,
    meridiem,
    normalised,
    option,
    same_phrase,
    words,
)
from rloom.rewards.rules.limited import GroundTruthError, evaluated, result
from rloom.rewards.rules.numbers import close

LONGEST_ANSWER = 1000  # characters; parsing a longer answer would take seconds

_FUNCTION = r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|det|arg|deg|dim|gcd|min|max)"
# Left sides of an equation whose right side is the answer: x, x_1, f(x), AB, \angle ABC, |z|, \sin A
_QUANTITY = re.compile(
    r"(?:\\(?:angle|triangle|operatorname)\s*)?(?:\\text\s*\{[^{}]*\}|\\(?:overline|vec|hat)\s*\{[^{}]*\}|[A-Z]{2,4}"
    r"|\|?(?:\\[a-zA-Z]+|[a-zA-Z])'*(?:_(?:\{[^{}]*\}|\w))?(?:\([^()]*\))?\|?"
    rf"|{_FUNCTION}(?:\^\{{?-?\d\}}?)?\s*\(?\s*(?:\\angle\s*)?(?:\\[a-zA-Z]+|[A-Za-z]{{1,3}})\s*\)?)"
)
_ELEMENT_OF = re.compile(r"\\?[a-zA-Z]+\s*\\in(?![a-zA-Z])\s*")
_REGION = re.compile(rf"{INEQUALITY.pattern}|\\setminus(?![a-zA-Z])")
_OPTION_ONLY = re.compile(r"\(?[A-H]\)?")
_UNORDERED = {",", "{}"}


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float | str | None]:
    truth = true_answer(data_source, ground_truth)
    answer = last_boxed(solution_str)
    right, fault = compared(answer, truth)
    return result(right, answer, fault)


def true_answer(data_source: str, ground_truth: Any) -> str:
    text = "" if ground_truth is None else str(ground_truth).strip()
    if r"\boxed" in text:
        text = last_boxed(text) or ""
    if not text:
        raise GroundTruthError(f"ground_truth={ground_truth!r} of a {data_source} row has no answer")
    if boxed_at(f"{{{text}}}", 0) != text:
        raise GroundTruthError(f"ground_truth={ground_truth!r} of a {data_source} row has braces without a partner")
    return text


def same_answer(answer: str, truth: str) -> bool:
    return compared(answer, truth)[0]


def compared(answer: str | None, truth: str) -> tuple[bool, str | None]:
    """Whether the answer is correct, and the reason if it could not be compared: the answer's fault, unless the ground
    truth alone cannot be evaluated either."""
    if answer is None:
        return False, None
    if len(answer) > LONGEST_ANSWER:
        return False, f"it has {len(answer)} characters, more than {LONGEST_ANSWER}"
    load_library()  # outside the time limit
    right, fault = evaluated(lambda: _same(normalised(answer), normalised(truth)))
    if fault is not None:
        _, truth_fault = evaluated(lambda: evaluate(normalised(truth)))
        if truth_fault is not None:
            raise GroundTruthError(f"ground_truth={truth[:80]!r} cannot be used: {truth_fault}")
    return bool(right), fault


def _same(answer: str, truth: str) -> bool:
    if not answer or not truth:
        return False
    if as_text(answer) == as_text(truth):
        return True
    for compare in (
        _same_words,
        _same_number,
        _same_approximation,
        _same_time,
        _same_equation,
        _same_in_base,
        _same_region,
        _same_collection,
        _same_matrix,
    ):
        equal = compare(answer, truth)
        if equal is not None:
            return equal
    return equal_expressions(answer, truth)


# Each of these returns whether the answers are equal, or None if they are not of its kind.


def _same_words(answer: str, truth: str) -> bool | None:
    given, wanted = words(answer), words(truth)
    if _OPTION_ONLY.fullmatch(as_text(truth)) or _OPTION_ONLY.fullmatch(as_text(answer)):
        choice, true_choice = option(answer), option(truth)
        if choice is not None and true_choice is not None:
            return choice == true_choice
    if given is None and wanted is None:
        return None
    return _letters(answer) == _letters(truth) or (
        given is not None and wanted is not None and same_phrase(given, wanted)
    )


def _letters(latex: str) -> str:
    return as_text(latex).strip("()").casefold()


def _same_number(answer: str, truth: str) -> bool | None:
    given, wanted = exact_number(answer), exact_number(truth)
    if given is None or wanted is None:
        return None
    if given[1] != wanted[1]:  # a decimal may be a rounded exact value, but not a rounded decimal
        return close(given[0], wanted[0])
    return given[0] == wanted[0]


def _same_approximation(answer: str, truth: str) -> bool | None:
    r"""`x \approx 12` is 12, `\frac23 \approx 0.67` is 2/3. A ground truth with both may be given as either."""
    given, wanted = at_approximately(answer), at_approximately(truth)
    if len(given) == len(wanted) == 1:
        return None
    value = given[1] if len(given) > 1 and _QUANTITY.fullmatch(given[0]) else given[0]
    return any(_same(value, part) for part in wanted if part)


def _same_time(answer: str, truth: str) -> bool | None:
    """`10:30 p.m.`. The question may name the half of the day, so an answer may omit it."""
    given, wanted = meridiem(answer), meridiem(truth)
    if given is None and wanted is None:
        return None
    (time, half), (true_time, true_half) = given or (answer, ""), wanted or (truth, "")
    return (half == true_half or not half or not true_half) and _same(time, true_time)


def _same_in_base(answer: str, truth: str) -> bool | None:
    r"""`52_7`: digits and base. The question names the base, so an answer may omit it."""
    given, wanted = based_number(answer), based_number(truth)
    if wanted is not None:
        return given == wanted if given is not None else answer == wanted[0]
    if given is None:
        return None
    return given[1] == 10 and given[0] == truth


def _same_equation(answer: str, truth: str) -> bool | None:
    r"""`x = 5` and `5` are the same answer; `x + y + z = 0` and `0` are different answers."""
    answer, truth = _ELEMENT_OF.sub("", answer, count=1), _ELEMENT_OF.sub("", truth, count=1)
    if len(at_commas(answer)) > 1 or len(at_commas(truth)) > 1:
        return None
    given, wanted = at_equals(answer), at_equals(truth)
    if len(given) == len(wanted) == 1:
        return None
    if len(given) > 1 and len(wanted) > 1:
        if as_text(given[0]) == as_text(wanted[0]):
            return _same(given[-1], wanted[-1])
        return equal_equations((given[0], given[-1]), (wanted[0], wanted[-1]))
    value, other = (given, truth) if len(given) > 1 else (wanted, answer)
    if _QUANTITY.fullmatch(value[0]) or _is_true_arithmetic(value):
        return _same(value[-1], other) if value is given else _same(other, value[-1])
    return False


def _is_true_arithmetic(parts: Sequence[str]) -> bool:
    """`17 + 3 = 20`."""
    letters = re.sub(r"\\[a-zA-Z]+", "", parts[0])
    return re.search("[a-zA-Z]", letters) is None and _same(parts[0], parts[-1])


def _same_region(answer: str, truth: str) -> bool | None:
    r"""`x < 1 \text{ or } x > 2` and `(-\infty, 1) \cup (2, \infty)`."""
    return equal_regions(answer, truth) if _REGION.search(answer) or _REGION.search(truth) else None


def _same_collection(answer: str, truth: str) -> bool | None:
    """Lists, sets, tuples, intervals, unions and ratios, element by element."""
    (given_kind, given), (wanted_kind, wanted) = _elements(answer), _elements(truth)
    if given_kind is None and wanted_kind is None:
        return None
    if INEQUALITY.search(answer) or INEQUALITY.search(truth):  # `x > 3` and `(3, \infty)`
        return None
    kinds = {given_kind or ",", wanted_kind or ","}
    if kinds == {"{}"}:
        return _same_in_any_order(_distinct(given), _distinct(wanted))
    if kinds <= _UNORDERED or kinds == {"union"}:
        return _same_in_any_order(given, wanted)
    if len(kinds) > 1 and kinds != {",", "()"}:
        return False
    return len(given) == len(wanted) and all(map(_same, given, wanted))


def _elements(latex: str) -> tuple[str | None, list[str]]:
    r"""The kind (brackets, "," for a bare list, "union", ":") and the elements; None for anything else."""
    latex = _ELEMENT_OF.sub("", latex, count=1)
    if latex == r"\emptyset":
        return "{}", []
    if exact_number(latex) is not None:  # the comma of `1,234` separates thousands
        return None, [latex]
    if len(pieces := at_unions(latex)) > 1:
        return "union", pieces
    if len(pieces := at_commas(latex)) > 1:
        return ",", [part for piece in pieces for part in _both_signs(piece)]
    if len(pieces := at_colons(latex)) > 1:
        return ":", pieces
    if (found := enclosed(latex)) is not None:
        brackets, inside = found
        pieces = at_commas(inside)
        if len(pieces) > 1 or brackets == "{}":
            return brackets, [part for piece in pieces for part in _both_signs(piece)]
    if len(both := _both_signs(latex)) > 1:
        return ",", both
    return None, [latex]


def _both_signs(latex: str) -> list[str]:
    r"""`1 \pm \sqrt{2}` is two answers."""
    parts = re.split(r"\\pm(?![a-zA-Z])", latex)
    return [latex] if len(parts) != 2 else [f"{parts[0]}+{parts[1]}".removeprefix("+"), f"{parts[0]}-{parts[1]}"]


def _distinct(elements: Sequence[str]) -> list[str]:
    found: list[str] = []
    for element in elements:
        if not any(_same(element, other) for other in found):
            found.append(element)
    return found


def _same_in_any_order(given: Sequence[str], wanted: Sequence[str]) -> bool:
    left = list(wanted)
    if len(given) != len(left):
        return False
    for element in given:
        match = next((index for index, other in enumerate(left) if _same(element, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_matrix(answer: str, truth: str) -> bool | None:
    given, wanted = matrix_rows(answer), matrix_rows(truth)
    if given is None or wanted is None:
        return None
    (given_kind, given_rows), (wanted_kind, wanted_rows) = given, wanted
    if given_kind != wanted_kind or [len(row) for row in given_rows] != [len(row) for row in wanted_rows]:
        return False
    cells = [
        (one, other) for rows in zip(given_rows, wanted_rows, strict=True) for one, other in zip(*rows, strict=True)
    ]
    return all(_same(one, other) for one, other in cells)
