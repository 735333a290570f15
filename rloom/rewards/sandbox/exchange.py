"""Calls from one process of a sandbox to the other, in both directions.

The tests call the functions of the program. A function that a test passes to the program is called back while the test
waits. Arguments and results are plain values (`values.py`); other objects stay where they are, and the other process
has a `Handle` of them.

The tests' process never executes what the program sends. `Peer.may_export` and `Peer.may_do` restrict what the program
can reach there.
"""

import builtins
import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NoReturn

from rloom.rewards.framing import framed, read_frame, write_all
from rloom.rewards.sandbox.values import Table, contents, decode, encode, fill

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
