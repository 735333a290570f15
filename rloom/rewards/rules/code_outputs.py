"""Whether what a program printed or returned is the expected output."""

import math
from typing import Any

TOLERANCE = 1e-6  # relative, or absolute below 1


def same_text(printed: str, expected: str) -> bool:
    """Line by line, without spaces at the ends of lines and empty lines at the end. Within a line, decimals may differ
    by their rounding."""
    given, wanted = _lines(printed), _lines(expected)
    return len(given) == len(wanted) and all(map(_same_line, given, wanted))


def same_value(returned: Any, expected: Any) -> bool:
    """`expected` may be in a list of its own, as in APPS."""
    return _same(returned, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _same(returned, expected[0])
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    words, others = given.split(), wanted.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(given: str, wanted: str) -> bool:
    if given == wanted:
        return True
    if "." not in wanted and "." not in given and "e" not in given.lower():  # integers and words must be equal
        return False
    try:
        return _close(float(given), float(wanted))
    except ValueError:
        return False


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, float) or isinstance(wanted, float):
        return isinstance(given, int | float) and isinstance(wanted, int | float) and _close(given, wanted)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_same(given[key], wanted[key]) for key in given)
    return bool(given == wanted)


def _close(given: float, wanted: float) -> bool:
    return math.isclose(given, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
