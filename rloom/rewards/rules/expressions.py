r"""Mathematical equality of two LaTeX expressions: parsed by math-verify's parser, compared by their values.

Different values prove two expressions unequal, and values equal to 25 digits at several points count as equal. Both
take a fraction of the time of symbolic simplification. math-verify compares expressions without values (an inequality,
an unknown function).
"""

import random
import re
import threading
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

DIGITS = 30
CLOSE = 1e-6  # for a decimal compared with an exact value
POINTS = 3
LARGE = 10**15  # below it, DIGITS tell integers apart
MOST_DIGITS = 20_000  # of constants that are compared to the last digit

_DECIMAL = re.compile(r"(\^\s*)?(?<![\d.])(\d*)\.(\d+)(?![\d.])")
# The parser ignores the subscript of a number and an accent, adds numbers with a space between them, and multiplies by
# the letters of a text.
_MISREAD = re.compile(r"[\d}]\s*_|['\"]|\d\s+\d|^[^\w\\({\[|+-]|\\text(?![a-zA-Z])")
# To restate the sum or the integral of the question is not an answer.
_UNEVALUATED = re.compile(r"\\(?:sum|prod|i+nt|oint|lim|limsup|liminf)(?![a-zA-Z])")


@cache
def load_library() -> None:
    """Import math-verify and SymPy, and let the parser build its tables: half a second or more, once per process."""
    import math_verify  # noqa: F401

    _parsed(r"\frac{x}{2}+(1,2)")


def equal_expressions(answer: str, truth: str) -> bool:
    from sympy import Expr

    if _UNEVALUATED.search(answer) and not _UNEVALUATED.search(truth):
        return False
    given, wanted = _parsed(answer), _parsed(truth)
    if given is None or wanted is None:
        return False
    if not (isinstance(given, Expr) and isinstance(wanted, Expr)):
        return _equal_relations(given, wanted)
    if given == wanted:
        return True
    rounded = _has_decimal(answer) != _has_decimal(truth)
    results = [_same_value(given, wanted, point, rounded) for point in _points(given, wanted)]
    known = [result for result in results if result is not None]
    return all(known) if known else _library_agrees(given, wanted)


def equal_equations(answer: tuple[str, str], truth: tuple[str, str]) -> bool:
    """(left, right) sides. Equal if one equation is the other times a constant, as `x = 5` and `10 = 2x`."""
    from sympy import Expr

    sides = [_parsed(side) for side in (*answer, *truth)]
    if not all(isinstance(side, Expr) for side in sides):
        return False
    given, wanted = sides[0] - sides[1], sides[2] - sides[3]
    if given.free_symbols != wanted.free_symbols or not given.free_symbols:
        return False
    points = list(_points(given, wanted))
    values = [(_value(given, point), _value(wanted, point)) for point in points]
    pairs = [(one, other) for one, other in values if one is not None and other is not None and abs(other) > 0]
    if len(pairs) < 2:
        return False
    ratios = [one / other for one, other in pairs]
    return all(abs(ratio) > 0 and _agree(ratio, ratios[0]) for ratio in ratios)


def evaluate(latex: str) -> None:
    """Everything that a comparison evaluates. It takes too long, or raises, if the expression cannot be compared."""
    from sympy import Expr

    found = _parsed(latex)
    expressions = [] if found is None else [part for part in (found, *found.args) if isinstance(part, Expr)]
    for expression in expressions:
        for point in _points(expression, expression):
            _value(expression, point)


def equal_regions(answer: str, truth: str) -> bool | None:
    """Of numbers, given as solved inequalities, intervals or unions of them. None if one of them is something else."""
    given, wanted = _region(answer), _region(truth)
    if given is None or wanted is None:
        return None
    (variable, numbers), (true_variable, true_numbers) = given, wanted
    return numbers == true_numbers and (variable == true_variable or None in (variable, true_variable))


def _region(latex: str) -> tuple[Any, Any] | None:
    """The variable, if it is named, and the set of its values."""
    from sympy import Intersection, Set, Union

    variables: set[Any] = set()
    pieces = []
    for piece in re.split(r"\\lor |\\cup(?![a-zA-Z])", latex):
        parts = []
        for part in piece.split(r"\land "):
            found = _parsed(part.strip())
            if isinstance(found, Set):
                parts.append(found.doit())
            elif (solved := _solved(found)) is not None:
                variables.add(solved[0])
                parts.append(solved[1])
            else:
                return None
        pieces.append(Intersection(*parts))
    return (next(iter(variables), None), Union(*pieces)) if len(variables) <= 1 else None


def _solved(found: Any) -> tuple[Any, Any] | None:
    """The variable and the interval of `x < 3` and `-1 < g(x) < 3`. None for others, because to restate the inequality
    of the question is not an answer."""
    from sympy import And, Intersection, Symbol
    from sympy.core.function import AppliedUndef
    from sympy.core.relational import Relational

    intervals, variables = [], set()
    for relation in found.args if isinstance(found, And) else (found,):
        if not isinstance(relation, Relational):
            return None
        if not isinstance(relation.lhs, Symbol | AppliedUndef):
            relation = relation.reversed
        if not isinstance(relation.lhs, Symbol | AppliedUndef) or relation.rhs.free_symbols:
            return None
        variables.add(relation.lhs)
        intervals.append(_interval(relation.rel_op, relation.rhs))
    return (variables.pop(), Intersection(*intervals)) if len(variables) == 1 else None


def _interval(operator: str, bound: Any) -> Any:
    """The numbers x of `x operator bound`; `as_set` of SymPy solves inequalities and takes a hundred times longer."""
    from sympy import Interval, Union, oo

    below, above = Interval.open(-oo, bound), Interval.open(bound, oo)
    return {
        "<": below,
        ">": above,
        "<=": Interval(-oo, bound),
        ">=": Interval(bound, oo),
        "!=": Union(below, above),
        "==": Interval(bound, bound),
    }[operator]


def _as_fraction(decimal: re.Match[str]) -> str:
    fraction = rf"\frac{{{int(decimal[2] + decimal[3])}}}{{{10 ** len(decimal[3])}}}"
    return f"^{{{fraction}}}" if decimal[1] else fraction


def _has_decimal(latex: str) -> bool:
    return _DECIMAL.search(latex) is not None


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> Any:
    """A SymPy object, with decimals as exact fractions and `i` as the imaginary unit; None if it cannot be parsed."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Basic, I, Symbol

    if _MISREAD.search(latex):
        return None
    try:
        found = latex2sympy(
            _DECIMAL.sub(_as_fraction, latex),
            normalization_config=NormalizationConfig(
                basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
            ),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # the parser raises many classes
        return None
    if not isinstance(found, Basic):
        return None
    imaginary = Symbol("i")
    return found.xreplace({imaginary: I}) if imaginary in found.free_symbols else found


def _points(given: Any, wanted: Any) -> Iterator[dict[Any, Any]]:
    """Values for all symbols of both, the same in every process; one point has negative values."""
    from sympy import Rational

    symbols = sorted(given.free_symbols | wanted.free_symbols, key=str)
    if not symbols:
        yield {}
        return
    draw = random.Random(0)
    for number in range(POINTS):
        sign = -1 if number == 1 else 1
        yield {symbol: sign * Rational(draw.randint(100, 999), 397) for symbol in symbols}


def _same_value(given: Any, wanted: Any, point: dict[Any, Any], rounded: bool) -> bool | None:
    one, other = _value(given, point), _value(wanted, point)
    if one is None or other is None:
        return None
    if _agree(one, other):
        return _same_large_number(given, wanted, one)
    return bool(rounded and not point and abs(one - other) <= CLOSE * min(1, max(abs(one), abs(other))))


def _same_large_number(given: Any, wanted: Any, value: Any) -> bool:
    """Whether two rational constants with equal first digits are equal: 2^100 and 2^100 - 2 differ in the 31st."""
    if abs(value) < LARGE or not (given.is_rational and wanted.is_rational and value.is_real):
        return True
    import mpmath  # type: ignore[import-untyped]

    digits = DIGITS + int(mpmath.mag(abs(value)) * 0.302)  # of 0.30103 decimal digits a binary one
    if digits > MOST_DIGITS:
        return True
    return bool(abs(given.evalf(digits) - wanted.evalf(digits)) < CLOSE)


def _value(expression: Any, point: dict[Any, Any]) -> Any:
    """A SymPy number of DIGITS digits, or None."""
    value = expression.evalf(DIGITS, subs=point)
    return value if value.is_number and value.is_finite and value.is_comparable is not None else None


def _agree(one: Any, other: Any) -> bool:
    size = max(abs(one), abs(other))
    return bool(size == 0 or abs(one - other) <= size * 10 ** (5 - DIGITS))


def _equal_relations(given: Any, wanted: Any) -> bool:
    return bool(given == wanted) or _library_agrees(given, wanted)


def _library_agrees(given: Any, wanted: Any) -> bool:
    from math_verify import verify

    # LIMIT_S of limited.py applies. math-verify's own limit needs the main thread; without one it writes a warning.
    limit_s = 600 if threading.current_thread() is threading.main_thread() else None
    try:
        return bool(verify(wanted, given, timeout_seconds=limit_s, raise_on_error=True))
    except Exception:  # the two cannot be compared, such as a set and a matrix
        return False
