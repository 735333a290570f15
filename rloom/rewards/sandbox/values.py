"""Values between the process of a program and the process of its tests, as JSON.

None, bool, str, and ints and floats that JSON has stand for themselves. Every other value is a list that begins with a
tag. A value arrives as a new object of a plain type: what a program redefined about its objects (`__eq__`, `__class__`,
subclasses) does not arrive. Objects without a plain form stay in their process and are named by a number
(`exchange.py`).

Standard library only: the launcher imports this file without site-packages.
"""

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any

_WORD = 1 << 63
# The plain value of an object of a subclass, by the method of the base class: the subclass may have another one.
_PLAIN: Mapping[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    list: list.copy,
    dict: dict.copy,
    set: set().union,
    frozenset: frozenset().union,
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
}
# travel by their names: a test may compare with one (`type(x) == int`), or pass one to a function
_TYPES = {
    kind.__name__: kind
    for kind in (
        bool,
        bytearray,
        bytes,
        complex,
        dict,
        float,
        frozenset,
        int,
        list,
        object,
        set,
        str,
        tuple,
        type(None),
    )
}
# type -> (its parts, the object of such parts)
_IMMUTABLE: Mapping[type, tuple[Callable[[Any], Sequence[Any]], Callable[..., Any]]] = {
    tuple: (list, lambda *items: items),
    frozenset: (list, lambda *items: frozenset(items)),
    complex: (lambda value: [value.real, value.imag], complex),
    bytes: (lambda value: [value.hex()], bytes.fromhex),
    range: (lambda value: [value.start, value.stop, value.step], range),
    slice: (lambda value: [value.start, value.stop, value.step], slice),
    Fraction: (lambda value: [value.numerator, value.denominator], Fraction),
    Decimal: (lambda value: [str(value)], Decimal),
    date: (lambda value: [value.isoformat()], date.fromisoformat),
    datetime: (lambda value: [value.isoformat()], datetime.fromisoformat),
    time: (lambda value: [value.isoformat()], time.fromisoformat),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], timedelta),
    type({}.keys()): (list, lambda *items: dict.fromkeys(items).keys()),
    type({}.values()): (list, lambda *items: dict(enumerate(items)).values()),
    type({}.items()): (list, lambda *items: dict(items).items()),
}
# changes in place are seen by both processes
_MUTABLE = (list, dict, set, deque, Counter, OrderedDict, defaultdict, bytearray)
_TAGS = {kind.__name__: kind for kind in (*_IMMUTABLE, *_MUTABLE)}


class Table:
    """The mutable objects of one exchange, in the order in which they occur in its messages. A second occurrence is a
    reference, so that aliases stay aliases and an argument that comes back is the same object."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._positions: dict[int, int] = {}

    def add(self, value: Any) -> None:
        self._positions[id(value)] = len(self.objects)
        self.objects.append(value)

    def position(self, value: Any) -> int | None:
        return self._positions.get(id(value))


def contents(value: Any) -> list[Any]:
    """The elements of a mutable object; of a dict, keys and values in turn."""
    return list(chain.from_iterable(value.items())) if isinstance(value, dict) else list(value)


def fill(value: Any, items: Sequence[Any]) -> None:
    value.clear()
    if isinstance(value, dict):
        # Counter.update adds; a plain assignment is right for all kinds of dict
        for key, item in zip(items[::2], items[1::2], strict=True):
            value[key] = item
    elif isinstance(value, set):
        value.update(items)
    else:
        value.extend(items)


def encode(value: Any, table: Table, other: Callable[[Any], Any]) -> Any:
    """`other` encodes what has no plain form."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_WORD < value < _WORD else ["large", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["special", repr(value)]
    if kind in _MUTABLE:
        return _mutable(value, table, other)
    if kind in _IMMUTABLE:
        return [kind.__name__, [encode(part, table, other) for part in _IMMUTABLE[kind][0](value)]]
    return _unusual(value, table, other)


def _mutable(value: Any, table: Table, other: Callable[[Any], Any]) -> Any:
    position = table.position(value)
    if position is not None:
        return ["again", position]
    table.add(value)
    items = [encode(item, table, other) for item in contents(value)]
    if type(value) is defaultdict:
        factory = next((name for name, kind in _TYPES.items() if kind is value.default_factory), None)
        return ["defaultdict", items, factory]
    return [type(value).__name__, items]


def _unusual(value: Any, table: Table, other: Callable[[Any], Any]) -> Any:
    name = next((name for name, kind in _TYPES.items() if kind is value), None)
    if name is not None:
        return ["type", name]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    if numpy is not None and isinstance(value, numpy.integer):
        return encode(int(value), table, other)
    if numpy is not None and isinstance(value, numpy.floating):
        return encode(float(value), table, other)
    fields = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if fields is not None:
        return ["namedtuple", type(value).__name__, list(fields), [encode(item, table, other) for item in value]]
    for base, converted in _PLAIN.items():
        if isinstance(value, base):
            return encode(converted(value), table, other)
    return other(value)


def decode(data: Any, table: Table, other: Callable[[Sequence[Any]], Any]) -> Any:
    """`other` decodes the lists with a tag of its own. ValueError, TypeError or another Exception if `data` is not what
    `encode` returns: the other process may send anything."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("a value is an object of JSON")
        return data
    tag = data[0]
    if tag not in _TAGS:
        return _DECODED[tag](data, table, other) if tag in _DECODED else other(data)
    kind = _TAGS[tag]
    if kind in _IMMUTABLE:
        return _IMMUTABLE[kind][1](*[decode(item, table, other) for item in data[1]])
    value = defaultdict(_TYPES.get(data[2])) if kind is defaultdict else kind()
    table.add(value)  # before its elements, one of which may be the object itself
    fill(value, [decode(item, table, other) for item in data[1]])
    return value


def _namedtuple(data: Sequence[Any], table: Table, other: Callable[[Sequence[Any]], Any]) -> Any:
    _, name, fields, items = data
    values = [decode(item, table, other) for item in items]
    if any(field in dir(tuple) and callable(value) for field, value in zip(fields, values, strict=True)):
        raise ValueError("a field that takes the place of a method of tuple")
    return namedtuple(name, fields)(*values)


_DECODED: Mapping[str, Callable[[Sequence[Any], Table, Callable[[Sequence[Any]], Any]], Any]] = {
    "again": lambda data, table, other: table.objects[data[1]],
    "large": lambda data, table, other: int(data[1], 16),
    "special": lambda data, table, other: float(data[1]),
    "type": lambda data, table, other: _TYPES[data[1]],
    "namedtuple": _namedtuple,
}
