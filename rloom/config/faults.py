"""The schema's report on a tree of keys, as sentences: one a key, with its value and the way out."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rloom.config.keys import Key, all_keys, did_you_mean
from rloom.config.unsupported import unsupported_key, unsupported_value


def sentences(error: ValidationError) -> list[str]:
    found: dict[str, str] = {}  # a union reports each of its members: the first counts
    for fault in error.errors():
        for path, text in describe(fault):
            found.setdefault(path, text)
    return list(found.values())


def describe(fault: Any) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) for one entry of pydantic's report."""
    location = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        for path, value in leaves(".".join(location), fault["input"]):
            yield path, unknown_key(path, value)
        return
    keys = all_keys()
    while ".".join(location) not in keys:  # pydantic appends the member of a union that it tried
        location.pop()
    path = ".".join(location)
    yield path, wrong_value(keys[path], fault)


def unknown_key(path: str, value: Any) -> str:
    later = unsupported_key(path)
    if later is not None:
        return later.sentence(f"{path}={value!r}")
    return f"{path}: there is no such key{did_you_mean(path)} (`rloom config` lists them all)"


def wrong_value(found: Key, fault: Any) -> str:
    given = fault["input"]
    later = unsupported_value(found.path, given)
    if later is not None:
        return later.sentence(f"{found.path}={given}")
    if found.section is not None:
        return f"{found.path}={given!r}: it is a section of keys"
    # pydantic lists the choices of a literal; the key's type does so already
    reason = "not one of the values it takes" if fault["type"] == "literal_error" else fault["msg"].lower()
    return f"{found.path}={given!r}: {reason}; it takes {found.kind}, by default {found.default}"


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The whole keys of which `path` is only the first unknown part: `actor` -> `actor.optim.lr`."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, below in value.items():
        yield from leaves(f"{path}.{name}", below)
