"""The process of the tests: it calls the program, compares, and reports. It never executed generated code.

The tests arrive in a memory file that only this process reads. Names of the tests are their own: builtins, their
imports and definitions, and the beginning of the function that the row gives. Only the names that the program has to
define are the program's, as handles (`exchange.py`).
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from types import TracebackType
from typing import Any, NoReturn

from rloom.rewards.sandbox.exchange import Handle, Peer
from rloom.rewards.sandbox.harness import describe

_MODULE = "tests"
_TEXT_LENGTH = 300


class SandboxReport:
    """Writes results to a pipe, one line of JSON each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, **values: Any) -> None:
        os.write(self._descriptor, json.dumps(values).encode() + b"\n")


class _Cases:
    """`__case__` of the tests: `if __case__.wanted(0):` and `with __case__(0): assert ...`. `end`: called after a
    failure; None: the others follow."""

    def __init__(self, report: SandboxReport, first: int, end: Callable[[], NoReturn] | None) -> None:
        self._report, self._first, self._index, self._end = report, first, first, end

    def wanted(self, index: int) -> bool:
        return index >= self._first

    def __call__(self, index: int) -> "_Cases":
        self._index = index
        return self

    def __enter__(self) -> None:
        self._report(begin=self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._report(case=self._index, error=None if error is None else _reason(error))
        if error is not None and self._end is not None:
            self._end()
        return True


class _Connection(Peer):
    """To the program, which can call back functions that it got as arguments, and use objects of classes that the tests
    define. Names that begin with an underscore are refused: they lead to the tests themselves."""

    def __init__(
        self, descriptor: int, longest_message: int, report: SandboxReport, end: Callable[[], NoReturn]
    ) -> None:
        super().__init__(descriptor, longest_message)
        self._report, self._end = report, end
        self._named: set[int] = set()  # numbers of the classes that the tests name

    def lost(self, reason: str) -> NoReturn:
        # an exception could be caught by the tests, which would go on without the program
        if not reason.startswith("the connection"):
            self._report(error=reason)
        self._end()

    def functions(self, names: Sequence[str], *, methods: bool) -> dict[str, Any]:
        """What the program defines of these names."""
        found = self.request("names", names, methods)
        # the program may have sent other names, which would replace those of the tests
        known = {name: found[name] for name in names if name in found}
        # by the tests' spelling: the program could make a class of a function that is asked for
        classes = [value for name, value in known.items() if name[0].isupper() and isinstance(value, Handle)]
        self._named = {value._rloom_number for value in classes}
        return known

    def is_named(self, own_class: int | None) -> bool:
        return own_class in self._named

    def may_export(self, value: Any) -> bool:
        defined = value if isinstance(value, type) else type(value)
        return callable(value) or isinstance(value, Iterator) or defined.__module__ == _MODULE

    def may_do(self, operation: str, values: Sequence[Any]) -> bool:
        if not values or not self.is_exported(values[0]):
            return False
        if operation in ("getattr", "setattr", "delattr"):
            own = type(values[0]).__module__ == _MODULE
            return own and isinstance(values[1], str) and not values[1].startswith("_")
        return True


def execute(tests: int, connection: int, report: int, longest_message: int, *, end: Callable[[], NoReturn]) -> NoReturn:
    """`tests`: the memory file; the other descriptors: a socket to the program, and a pipe. `end` ends the process."""
    results = SandboxReport(report)
    try:
        with open(tests, "rb") as stream:
            wanted = json.loads(stream.read())
        peer = _Connection(connection, longest_message, results, end)
        cases = _Cases(results, wanted["first"], None if wanted["go_on"] else end)
        run = _run_asserts if wanted["function"] is None else _run_calls
        run(wanted, peer, cases)
    except BaseException as error:
        results(error=_reason(error))
    end()


def _run_asserts(wanted: Mapping[str, Any], peer: _Connection, cases: _Cases) -> None:
    names: dict[str, Any] = {"__name__": _MODULE}
    sys.modules[_MODULE] = type(sys)(_MODULE)  # dataclasses look up the module of a class there
    exec(compile(wanted["given"], "<given>", "exec"), names)
    names |= peer.functions(wanted["names"], methods=False)
    names["__case__"] = cases
    exec(compile(wanted["source"], "<tests>", "exec"), names)


def _run_calls(wanted: Mapping[str, Any], peer: _Connection, cases: _Cases) -> None:
    name, outputs = wanted["function"], wanted["outputs"]
    in_lists = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    found = peer.functions([name], methods=True)
    if name not in found:
        raise NameError(f"the program defines no function {name!r}")
    for index in range(wanted["first"], len(outputs)):
        with cases(index):
            value = _as_json(found[name](*wanted["calls"][index]))
            if not same_value(value, outputs[index], in_lists=in_lists):
                raise _OtherValue(f"returned {short(value)}, expected {short(outputs[index])}")


class _OtherValue(Exception):
    """A call returned another value than the expected one."""


def _as_json(value: Any) -> Any:
    """As outputs are written: a tuple is a list, a key is a string."""
    if isinstance(value, Handle):
        raise TypeError(f"returned an object of type {value._rloom_kind}")
    return json.loads(json.dumps(value))


def _reason(error: BaseException) -> str:
    """One line. An exception of the program comes with its description."""
    if isinstance(error, _OtherValue):
        text = str(error)
    elif isinstance(error, AssertionError) and not error.args:
        text = "assertion failed"
    else:
        text = error.__dict__.get("description") or describe(error)
    return str(text)[:_TEXT_LENGTH]


# Only where the expected value is a decimal: an integer is matched by an equal number alone.
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
