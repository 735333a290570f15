"""Numbers as people and models write them: `$1,000.`, `−3`, `3/4`, `42.0`."""

import re
from fractions import Fraction

MINUS_SIGNS = str.maketrans(dict.fromkeys("−–－﹣", "-"))  # U+2212, en dash, full width, small

# A minus after an operand is a subtraction, not a sign: `5-3` ends in 3, `= -3` and `是-3` in -3.
# Thousands need groups of exactly three digits, so that `1,2` is two numbers; a comma after them may end a clause.
_NUMBER = re.compile(
    r"(?P<sign>(?<![a-zA-Z\d_)\]}])-)?\\?[$€£¥￥]?(?P<inner_sign>(?<=[$€£¥￥])-)?"
    r"(?P<value>(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:\s*/\s*(?P<denominator>\d+(?:\.\d+)?))?"
)
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*([^{}]+?)\s*\}\s*\{\s*([^{}]+?)\s*\}")

# Thin and non-breaking spaces between thousands: `84\,000`. A plain space separates two numbers.
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")

# Before a number: bold, code, brackets, `:`, `≈`, `$`, `\(`, `\boxed{`. Not a line break, and no words: `#### Step 2`
# is a heading of Markdown.
_OPENING = re.compile(
    r"(?:[ \t\u00a0*`_{$(\[\"'“:：=≈~]|\\[(\[,;: ]|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)(?![a-zA-Z]))*"
)

TOLERANCE = Fraction(1, 1_000_000)


def plain_notation(text: str) -> str:
    r"""ASCII minus signs, thousands of LaTeX (`1{,}234`, `1,\!234`, `1\,234`) as `1,234`, and simple LaTeX fractions as
    `a/b`."""
    commas = _THIN_SPACE.sub(",", text.translate(MINUS_SIGNS).replace("{,}", ",").replace(r",\!", ","))
    return _LATEX_FRACTION.sub(r"\1/\2", commas)


def numbers_in(text: str) -> list[Fraction]:
    found = (_value(match) for match in _NUMBER.finditer(plain_notation(text)))
    return [number for number in found if number is not None]


def leading_number(text: str) -> Fraction | None:
    """The number at the start of `text`, after any markup."""
    text = plain_notation(text)
    opening = _OPENING.match(text)
    assert opening is not None  # it may be empty
    match = _NUMBER.match(text[opening.end() :])
    return None if match is None else _value(match)


def parse_number(text: str) -> Fraction | None:
    """`text` as a number, without surrounding spaces and trailing full stops; None if it is not one."""
    match = _NUMBER.fullmatch(plain_notation(text).strip().rstrip(".。").strip())
    return None if match is None else _value(match)


def close(left: Fraction, right: Fraction) -> bool:
    """Equal up to the rounding of a printed decimal; integers of any size must be equal."""
    return abs(left - right) <= TOLERANCE * min(Fraction(1), max(abs(left), abs(right)))


def canonical(number: Fraction) -> str:
    """One text per value, so that votes for 42, 42.0 and 42. are counted together."""
    if number.denominator == 1:
        return str(number.numerator)
    if number.numerator.bit_length() > 1_000:  # beyond what a float can hold
        return str(number)
    decimal = str(float(number))
    return decimal if Fraction(decimal) == number else str(number)


def _value(match: re.Match[str]) -> Fraction | None:
    try:
        value = Fraction(match["value"].replace(",", ""))
        if match["denominator"] is not None:
            value /= Fraction(match["denominator"])
    except (ValueError, ZeroDivisionError):  # thousands of digits, or a division by zero
        return None
    return -value if match["sign"] or match["inner_sign"] else value
