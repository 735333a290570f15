"""pydantic's validation errors as sentences: one per key, with its value and the way out."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rloom.config.keys import Key, Root, all_keys, did_you_mean
from rloom.config.schema import Config
from rloom.config.unsupported import unsupported_key, unsupported_value


def sentences(error: ValidationError, root: Root = Config) -> list[str]:
    found: dict[str, str] = {}  # a union reports each of its members: keep the first
    for fault in error.errors():
        for path, text in key_faults(fault, root):
            found.setdefault(path, text)
    return list(found.values())


def key_faults(fault: Any, root: Root) -> Iterator[tuple[str, str]]:
    """(key, sentence) for one entry of pydantic's report."""
    location = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        for path, value in unknown_leaves(".".join(location), fault["input"]):
            yield path, unknown_key(path, value, root)
        return
    keys = all_keys(root)
    while ".".join(location) not in keys:  # pydantic appends the name of a union's member
        location.pop()
    path = ".".join(location)
    yield path, wrong_value(keys[path], fault)


def unknown_key(path: str, value: Any, root: Root) -> str:
    missing = unsupported_key(path)
    if missing is not None:
        return missing.sentence(f"{path}={value!r}")
    return f"{path}: there is no such key{did_you_mean(path, root)} (`{root.listing}` lists them all)"


def wrong_value(found: Key, fault: Any) -> str:
    given = fault["input"]
    missing = unsupported_value(found.path, given)
    if missing is not None:
        return missing.sentence(f"{found.path}={given}")
    if found.section is not None:
        return f"{found.path}={given!r}: it is a section of keys"
    # pydantic lists the choices of a literal, which `found.kind` also does
    reason = "not one of the values it takes" if fault["type"] == "literal_error" else fault["msg"].lower()
    return f"{found.path}={given!r}: {reason}; it takes {found.kind}, by default {found.default}"


def unknown_leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The full keys below an unknown section `path`: `actor` -> `actor.optim.lr`."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, below in value.items():
        yield from unknown_leaves(f"{path}.{name}", below)
