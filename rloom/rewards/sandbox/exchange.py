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
from functools import partial
from typing import Any, NoReturn

from rloom.rewards.framing import framed, read_frame, write_all
from rloom.rewards.sandbox.values import Table, contents, decode, encode, fill

_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": lambda target, arguments, keywords: target(*arguments, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "iter": iter,
    "next": next,
    "len": len,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "str": str,
}


class Handle:
    """An object of the other process. Its methods are executed there, but never `==`, `<`, `in` or arithmetic: the
    process that compares does not ask the other one for the result. It is equal to itself only."""

    __slots__ = ("_rloom_kind", "_rloom_number", "_rloom_peer")

    def __init__(self, peer: "Peer", number: int, kind: str) -> None:
        object.__setattr__(self, "_rloom_peer", peer)
        object.__setattr__(self, "_rloom_number", number)
        object.__setattr__(self, "_rloom_kind", kind)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._rloom_peer.request("call", self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the protocols of copy, pickle and numpy ask for such names
            raise AttributeError(name)
        return self._rloom_peer.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._rloom_peer.request("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._rloom_peer.request("delattr", self, name)

    def __iter__(self) -> Any:
        items = self._rloom_peer.request("iter", self)
        return items if isinstance(items, Handle) else iter(items)

    def __next__(self) -> Any:
        return self._rloom_peer.request("next", self)

    def __len__(self) -> int:
        return self._rloom_peer.request("len", self)  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return True  # without it, Python would ask for the length

    def __getitem__(self, key: Any) -> Any:
        return self._rloom_peer.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._rloom_peer.request("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._rloom_peer.request("delitem", self, key)

    def __str__(self) -> str:
        return self._rloom_peer.request("str", self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<an object of type {self._rloom_kind} of the program>"


class Peer:
    """One end of the connection."""

    def __init__(self, descriptor: int, longest_message: int) -> None:
        self._descriptor, self._longest_message = descriptor, longest_message
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._handles: dict[int, Handle] = {}

    def may_export(self, value: Any) -> bool:
        return True

    def may_do(self, operation: str, values: Sequence[Any]) -> bool:
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
        try:
            if message[0] == "error":
                _, names, text, description = message
                # raised by a call, it would end a loop of the tests (`all(map(f, values))`) as if that were complete
                ends_loop = operation != "next" and "StopIteration" in names
                error = _exception(["RuntimeError"] if ends_loop else names, str(text))
                error.__dict__["description"] = str(description)
            else:
                _, data, changes = message
                result = decode(data, table, self._import)
                for position, items in changes:
                    fill(table.objects[position], [decode(item, table, self._import) for item in items])
                error = None
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
                raise TypeError("not possible with an object of the tests")
            result = self.do(operation, values)
            reply = ["value", encode(result, table, self._export), self._changes(table, before)]
        except BaseException as error:
            reply = ["error", _builtin_bases(error), _text_of(error), self.described(error)]
        self._write(reply)

    def _changes(self, table: Table, before: Sequence[Sequence[Any]]) -> list[Any]:
        """The new contents of arguments that were changed in place."""
        changes = []
        for position, earlier in enumerate(before):
            now = contents(table.objects[position])
            if len(now) != len(earlier) or any(map(operator.is_not, now, earlier)):
                changes.append([position, [encode(item, table, self._export) for item in now]])
        return changes

    def _export(self, value: Any) -> Any:
        if isinstance(value, Handle) and value._rloom_peer is self:
            return ["yours", value._rloom_number]
        if not self.may_export(value):
            raise TypeError(f"an object of type {type(value).__name__} cannot be passed to the program")
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)  # it stays alive, so that its id stays its own
        return ["mine", number, type(value).__name__]

    def _import(self, data: Sequence[Any]) -> Any:
        if data[0] == "yours" and type(data[1]) is int and data[1] >= 0:
            return self._exported[data[1]]
        if data[0] == "mine" and type(data[1]) is int:
            return self._handles.setdefault(data[1], Handle(self, data[1], str(data[2])))
        raise ValueError("an unknown kind of value")

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


def _builtin_bases(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of an exception of the program
        return ""


def _exception(names: Sequence[str], text: str) -> BaseException:
    """An exception of the first of these builtin types that takes a text."""
    for name in names:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                return kind(text)
            except TypeError:
                continue
    return Exception(text)
