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
    same_as: str | None = None  # a key whose value names rloom's behaviour, too

    def is_same(self, value: Any, tree: Mapping[str, Any]) -> bool:
        off = self.switch is not None and isinstance(value, Mapping) and value.get(self.switch) in OFF
        return off or value in self.same or (self.same_as is not None and value == value_in(tree, self.same_as))

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


def without_one_behaviour(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(the tree without these keys, a notice for each reason). Values that rloom refuses stay in the tree, where they
    are unknown."""
    settings: dict[str, list[str]] = {}  # by reason

    def kept(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in section.items():
            path = f"{prefix}{name}"
            key = verl_keys().get(path)
            if key is not None and key.is_same(value, tree):
                continue
            if key is not None and key.reason:
                settings.setdefault(key.reason, []).append(path if isinstance(value, dict) else f"{path}={value}")
            elif isinstance(value, dict) and any(one.startswith(f"{path}.") for one in verl_keys()):
                rest = kept(value, f"{path}.")
                if rest or not value:  # otherwise the section had such keys alone
                    found[name] = rest
            else:
                found[name] = value
        return found

    tree = without_targets(tree)
    rest = kept(tree, "")
    return rest, [f"{', '.join(all_)}: no effect in rloom, because {reason}" for reason, all_ in settings.items()]


def without_targets(tree: Any) -> Any:
    return {n: without_targets(value) for n, value in tree.items() if n != TARGET} if isinstance(tree, dict) else tree


def value_in(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree
