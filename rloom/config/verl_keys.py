"""verl's keys that are not part of the tree, and values of its keys that rloom does not have.

verl selects among several behaviours where rloom has one. A key with the value of rloom's behaviour is accepted in
silence. With another value it is accepted with a notice if the result is the same, and refused otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rloom.tables import read_table

OFF = (None, False, 0, "", "disabled")
TARGET = "_target_"  # verl's class of a section, in a configuration that verl wrote


@dataclass(frozen=True)
class VerlKey:
    """A key and the values that are not in `same`: a notice with `reason`, or an error with `missing`."""

    same: Sequence[Any] = ()  # values that name rloom's behaviour
    reason: str = ""  # completes "no effect in rloom, because"
    missing: str = ""  # subject and verb of "... not in this version of rloom"
    instead: str = ""
    switch: str | None = None  # an entry of a section; while it is off, the others have no effect in verl either

    def is_same(self, value: Any) -> bool:
        off = self.switch is not None and isinstance(value, Mapping) and value.get(self.switch) in OFF
        return off or value in self.same

    def accepts(self, value: Any) -> bool:
        return self.is_same(value) or bool(self.reason)

    def refusal(self, setting: str) -> str:
        return f"{setting}: {self.missing} not in this version of rloom; {self.instead}"


@cache
def verl_keys() -> dict[str, VerlKey]:
    """Keys or sections that rloom's tree does not have."""
    return {
        f"{section}{name}": VerlKey(**row)
        for group in read_table("verl_keys")["keys"]
        for section in [f"{below}." for below in group.get("below", ())] or [""]
        for name, row in group["keys"].items()
    }


@cache
def verl_values() -> dict[tuple[str, str], VerlKey]:
    """(key of rloom's tree, a value that rloom does not have, or `<type>`)"""
    rows = read_table("verl_keys")["values"].items()
    return {(key, value): VerlKey(**row) for key, values in rows for value, row in values.items()}


def unsupported_key(path: str) -> VerlKey | None:
    return next((key for start, key in verl_keys().items() if key.missing and f"{path}.".startswith(f"{start}.")), None)


def unsupported_value(path: str, value: Any) -> VerlKey | None:
    return verl_values().get((path, value if isinstance(value, str) else f"<{type(value).__name__}>"))


def unsupported_name(name: str) -> str | None:
    """The sentence for an unsupported key, a part of one, or an unsupported value."""
    for path, key in verl_keys().items():
        if key.missing and f".{name}." in f".{path}.":
            return key.refusal(path)
    return next((key.refusal(f"{path}={value}") for (path, value), key in verl_values().items() if value == name), None)


def without_one_behaviour(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """(the tree without these keys, notices). Values that rloom refuses stay in the tree, where they are unknown."""
    kept: dict[str, Any] = {}
    notices: list[str] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        key = verl_keys().get(path)
        if name == TARGET:
            continue
        if key is not None and key.accepts(value):
            setting = path if isinstance(value, dict) else f"{path}={value}"
            notices += [] if key.is_same(value) else [f"{setting}: no effect in rloom, because {key.reason}"]
        elif isinstance(value, dict) and (TARGET in value or any(one.startswith(f"{path}.") for one in verl_keys())):
            rest, inner = without_one_behaviour(value, f"{path}.")
            if rest or not value:  # otherwise the section had such keys alone
                kept[name] = rest
            notices += inner
        else:
            kept[name] = value
    return kept, notices
