"""Whether what a program printed or returned is the expected output. A tolerance holds only where the expected value is
a decimal: an integer is matched by an equal number alone."""

import math
import re
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6  # relative, or absolute below 1
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,6})?")
_LONGEST_NUMBER = 5000  # characters


def same_text(printed: str, expected: str) -> bool:
    """Line by line, without spaces at the ends of lines and empty lines at the end. Within a line, decimals may differ
    by their rounding."""
    given, wanted = _lines(printed), _lines(expected)
    return len(given) == len(wanted) and all(map(_same_line, given, wanted))


def same_value(returned: Any, expected: Any, *, in_lists: bool = False) -> bool:
    """`in_lists`: each expected value of the problem is in a list of its own, as in APPS, or is a list of one item."""
    return _same(returned, expected) or (in_lists and _same(returned, expected[0]))


def short(value: Any, length: int = 60) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."


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
    if not (_is_number(given) and _is_number(wanted)):
        return False
    if _is_decimal(wanted):
        return _close(float(given), float(wanted)) or Decimal(given) == Decimal(wanted)
    # two integers must be equal as words: 0011 and 11 differ where an answer is a string of digits
    return _is_decimal(given) and Decimal(given) == Decimal(wanted)


def _is_number(word: str) -> bool:
    return len(word) <= _LONGEST_NUMBER and _NUMBER.fullmatch(word) is not None


def _is_decimal(word: str) -> bool:
    return not word.lstrip("+-").isdigit()


def _same(given: Any, wanted: Any) -> bool:
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(wanted, float) and isinstance(given, int | float):
        return given == wanted or _close(given, wanted)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_same, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_same(given[key], wanted[key]) for key in given)
    return bool(given == wanted)


def _close(given: float, wanted: float) -> bool:
    try:
        return math.isfinite(given) and math.isclose(given, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an int beyond the range of float
        return False
