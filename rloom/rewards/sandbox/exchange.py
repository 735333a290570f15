"""Values and calls between the process of a program and the process of its tests, as JSON.

None, bool, str, and ints and floats that JSON has stand for themselves. Every other value is a list that begins with a
tag. A value arrives as a new object of a plain type: what a program redefined about its objects (`__eq__`, `__class__`,
subclasses) does not arrive. Objects without a plain form stay in their process, and the other one has a `Handle`.

The tests call the functions of the program. A function that a test passes to the program is called back while the test
waits. The tests' process never executes what the program sends. `Peer.may_export` and `Peer.may_do` restrict what the
program can reach there.

Standard library only: the launcher imports this file without site-packages.
"""

import builtins
import json
import math
import operator
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from typing import Any, NoReturn

from rloom.rewards.framing import framed, read_frame, write_all

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


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda target, arguments, keywords: target(*arguments, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "is_instance": lambda value, kind: isinstance(value, kind),
    "bool": bool,
    "__iter__": iter,
    "__next__": next,
    "__len__": len,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__contains__": operator.contains,
    "__str__": str,
    "__repr__": repr,
    "__enter__": lambda target: target.__enter__(),
    "__exit__": lambda target, *error: target.__exit__(None, None, None),
}
# What an object has of these, its handle has. Not `==`, `<` and arithmetic: they would leave a test to the program.
_PROTOCOLS = tuple(name for name in _OPERATIONS if name.startswith("__"))
# A test that calls such a method expects a plain value, whose own method gives the answer.
_METHODS_OF_PLAIN_TYPES = frozenset(
    name for kind in (int, float, str, bytes, list, tuple, dict, set) for name in dir(kind) if not name.startswith("_")
)
_READABLE_NAMES = ("__name__", "__doc__")


class Handle:
    """An object of the other process. Its methods are executed there. It is equal to itself only, and cannot be
    compared at all where its class has an `==` of its own."""

    __slots__ = ("_rloom_class", "_rloom_compares", "_rloom_kind", "_rloom_number", "_rloom_peer")

    def __init__(self, peer: "Peer", number: int, kind: str, compares: bool, own_class: int | None) -> None:
        values = {"peer": peer, "number": number, "kind": kind, "compares": compares, "class": own_class}
        for name, value in values.items():
            object.__setattr__(self, f"_rloom_{name}", value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_rloom") or (name.startswith("__") and name not in _READABLE_NAMES):
            raise AttributeError(name)  # the protocols of copy, pickle and numpy ask for such names
        if name in _METHODS_OF_PLAIN_TYPES and not self._rloom_peer.is_named(self._rloom_class):
            raise AttributeError(f"{name} of {_described(self)}, whose class the tests do not name")
        return self._rloom_peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._rloom_peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._rloom_peer.request("delattr", self, name)

    def __bool__(self) -> bool:
        return bool(self._rloom_peer.request("bool", self))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Handle) and bool(self._rloom_peer.request("is_instance", value, self))

    def __eq__(self, other: object) -> bool:
        _check_comparison(self)
        return self is other

    def __ne__(self, other: object) -> bool:
        _check_comparison(self)
        return self is not other

    def __hash__(self) -> int:
        _check_comparison(self)
        return id(self)

    def __repr__(self) -> str:
        return f"<{_described(self)}>"

    __str__ = __repr__


def _described(handle: Handle) -> str:
    return f"an object of type {handle._rloom_kind} of the program"


def _check_comparison(handle: Handle) -> None:
    if handle._rloom_compares:
        raise TypeError(f"{_described(handle)} has a comparison of its own, which does not decide a test")


def _remote(operation: str) -> Callable[..., Any]:
    return lambda self, *values: self._rloom_peer.request(operation, self, *values)


@cache
def _handle_class(protocols: tuple[str, ...]) -> type[Handle]:
    """Handles of objects with these methods."""
    methods: dict[str, Any] = {name: _remote(name) for name in protocols}
    if "__repr__" in protocols:
        methods.setdefault("__str__", methods["__repr__"])
    if "__call__" in protocols:
        methods["__call__"] = lambda self, *a, **k: self._rloom_peer.request("call", self, a, k)
    return type("Handle", (Handle,), {"__slots__": (), **methods})


class Peer:
    """One end of the connection."""

    def __init__(self, descriptor: int, longest_message: int) -> None:
        self._descriptor, self._longest_message = descriptor, longest_message
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._handles: dict[int, Handle] = {}
        self._exceptions: dict[int, type[BaseException]] = {}

    def may_export(self, value: Any) -> bool:
        return True

    def may_do(self, operation: str, values: Sequence[Any]) -> bool:
        return True

    def is_named(self, own_class: int | None) -> bool:
        """Whether the other process may be asked for all methods of objects of this class."""
        return True

    def is_exported(self, value: Any) -> bool:
        return id(value) in self._numbers

    def do(self, operation: str, values: Sequence[Any]) -> Any:
        return _OPERATIONS[operation](*values)

    def lost(self, reason: str) -> NoReturn:
        """The other process closed the connection, or sent what is not a message."""
        os._exit(1)

    def described(self, error: BaseException) -> str:
        return type(error).__name__

    def request(self, operation: str, *values: Any) -> Any:
        table = Table()
        encoded = [encode(value, table, self._export) for value in values]
        self._write(["do", operation, encoded])
        while (message := self._read())[0] == "do":  # the other process calls back
            self._answer(message)
        error: BaseException | None = None
        try:
            if message[0] == "error":
                error = self._received_error(operation, message)
            else:
                _, data, changes = message
                result = decode(data, table, self._import)
                for position, items in changes:
                    fill(table.objects[position], [decode(item, table, self._import) for item in items])
        except Exception as fault:  # whatever the bytes are, they are the other process's doing
            self.lost(f"the call returned what cannot be read ({type(fault).__name__})")
        if error is not None:
            raise error
        return result

    def serve(self) -> NoReturn:
        """Answer requests until the other side closes the connection."""
        while True:
            self._answer(self._read())

    def _answer(self, message: Sequence[Any]) -> None:
        table = Table()
        try:
            _, operation, data = message
            values = [decode(item, table, self._import) for item in data]
            before = [contents(value) for value in table.objects]
            if not self.may_do(operation, values):
                raise TypeError(f"a program cannot use {operation} on this object of the tests")
            result = self.do(operation, values)
            reply = ["value", encode(result, table, self._export), self._changes(table, before)]
        except BaseException as error:
            reply = ["error", *self._sent_error(error), self.described(error)]
        self._write(reply)

    def _changes(self, table: Table, before: Sequence[Sequence[Any]]) -> list[Any]:
        """The new contents of arguments that were changed in place."""
        changes = []
        for position, earlier in enumerate(before):
            now = contents(table.objects[position])
            if len(now) != len(earlier) or any(map(operator.is_not, now, earlier)):
                changes.append([position, [encode(item, table, self._export) for item in now]])
        return changes

    def _sent_error(self, error: BaseException) -> tuple[list[Any], list[Any]]:
        """The class of an exception and its arguments."""
        try:
            arguments = [encode(argument, Table(), self._export) for argument in error.args]
        except Exception:  # an argument that cannot be sent, or `args` of the program's making
            arguments = []
        return self._exception_class(type(error)), arguments

    def _exception_class(self, kind: type[BaseException]) -> list[Any]:
        own = [base for base in kind.__mro__ if base.__module__ != "builtins"]
        return ["exception", _builtin_bases(kind), [[self._number(k), k.__name__, _builtin_bases(k)] for k in own]]

    def _received_error(self, operation: str, message: Sequence[Any]) -> BaseException:
        _, kind, arguments, description = message
        if operation != "__next__" and "StopIteration" in kind[1]:
            # raised by a call, it would end a loop of the tests (`all(map(f, values))`) as if that were complete
            kind = ["exception", ["RuntimeError"], []]
        found = self._import(kind)
        values = [decode(argument, Table(), self._import) for argument in arguments]
        try:
            error = found(*values)
        except Exception:  # classes such as UnicodeDecodeError take certain arguments only
            error = Exception(*values)
        error.__dict__["description"] = str(description)
        return error  # type: ignore[no-any-return]

    def _export(self, value: Any) -> Any:
        if isinstance(value, Handle) and value._rloom_peer is self:
            return ["receiver's", value._rloom_number]
        if not self.may_export(value):
            raise TypeError(f"an object of type {type(value).__name__} cannot be passed to the program")
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._exception_class(value)
        kind = type(value)
        protocols = [name for name in (*_PROTOCOLS, "__call__") if _defines(kind, name)]
        own_class = self._number(kind) if kind.__module__ != "builtins" else None
        return ["sender's", self._number(value), kind.__name__, protocols, _defines(kind, "__eq__"), own_class]

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)  # it stays alive, so that its id stays its own
        return number

    def _import(self, data: Sequence[Any]) -> Any:
        if data[0] == "receiver's" and type(data[1]) is int and data[1] >= 0:
            return self._exported[data[1]]
        if data[0] == "sender's" and type(data[1]) is int:
            return self._handle(*data[1:])
        if data[0] == "exception":
            return self._imported_exception(*data[1:])
        raise ValueError("an unknown kind of value")

    def _handle(
        self, number: int, kind: str, protocols: Sequence[str], compares: bool, own_class: int | None
    ) -> Handle:
        if number not in self._handles:
            known = tuple(name for name in (*_PROTOCOLS, "__call__") if name in protocols)
            if not self.is_named(own_class):
                # `in` tells the other process the expected value: such an object is searched item by item instead
                known = tuple(name for name in known if name != "__contains__")
            self._handles[number] = _handle_class(known)(self, number, str(kind), bool(compares), own_class)
        return self._handles[number]

    def _imported_exception(self, bases: Sequence[str], own: Sequence[Sequence[Any]]) -> type[BaseException]:
        """An exception class of the other process: here a class of the same builtin types, so that it can be caught."""
        if not own:
            return _builtin_exceptions(bases)[0]
        number, name, builtin_bases = own[0]
        parents = [self._imported_exception(bases, own[1:])] if len(own) > 1 else []
        for builtin in _builtin_exceptions(builtin_bases):
            if not any(issubclass(parent, builtin) for parent in parents):
                parents.append(builtin)
        return self._exceptions.setdefault(number, type(str(name), tuple(parents), {}))

    def _write(self, message: Any) -> None:
        try:
            write_all(self._descriptor, framed(json.dumps(message).encode()))
        except OSError:
            self.lost("the connection is closed")

    def _read(self) -> Sequence[Any]:
        try:
            message = json.loads(read_frame(partial(os.read, self._descriptor), self._longest_message))
        except (OSError, EOFError):
            self.lost("the connection is closed")
        except Exception as error:  # deep JSON, bytes that are no text, a length without end
            self.lost(f"the call returned what cannot be read ({type(error).__name__})")
        if not isinstance(message, list) or len(message) not in (3, 4):
            self.lost("the call returned what cannot be read")
        return message


def _builtin_bases(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__ if base.__module__ == "builtins"]


def _builtin_exceptions(names: Sequence[str]) -> list[type[BaseException]]:
    kinds = [vars(builtins).get(name) for name in names]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException)]
    if not found:
        raise ValueError("not an exception")
    return found


def _defines(kind: type, name: str) -> bool:
    """Whether a class has such a method that is not the one of `object`."""
    return any(name in vars(base) for base in kind.__mro__ if base is not object)
