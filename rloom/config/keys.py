"""Names in the configuration tree: walk it, look one up, find the nearest to a misspelt one."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic.fields import FieldInfo

from rloom.config.schema import Config
from rloom.config.section import Section


@dataclass(frozen=True)
class Key:
    """One documented key: `path` is its dotted name."""

    path: str
    field: FieldInfo

    @property
    def doc(self) -> str:
        return self.field.description or ""

    @property
    def section(self) -> type[Section] | None:
        kind = self.field.annotation
        return kind if isinstance(kind, type) and issubclass(kind, Section) else None

    @property
    def default(self) -> Any:
        value = self.field.get_default(call_default_factory=True)
        return list(value) if isinstance(value, tuple) else value

    @property
    def kind(self) -> str:
        return type_name(self.field.annotation)

    @property
    def takes_any_entry(self) -> bool:
        """A free dictionary, such as `engine_kwargs`: what is below it is the user's own."""
        return self.kind.startswith("dict")


def type_name(annotation: Any) -> str:
    """`int | None` -> "int or null"; a Literal -> its choices."""
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    arguments = get_args(annotation)
    origin = str(annotation).split("[")[0]
    if origin.endswith("Literal"):
        return "|".join(str(choice) for choice in arguments)
    if origin in ("list", "tuple", "dict"):
        return origin
    return " or ".join(type_name(argument) for argument in arguments)


def walk(kind: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """Every key, sections before what is in them."""
    for name, field in kind.model_fields.items():
        found = Key(prefix + name, field)
        yield found
        if found.section is not None:
            yield from walk(found.section, f"{prefix}{name}.")


def all_keys() -> dict[str, Key]:
    return {found.path: found for found in walk()}


def nearest(unknown: str) -> str | None:
    """The real key that a misspelt or misplaced one most likely means."""
    leaves = [path for path, found in all_keys().items() if found.section is None]
    parts = unknown.split(".")
    for first in range(len(parts)):  # actor.optim.lr: the right end, too short a beginning
        ending = ".".join(parts[first:])
        same_end = [path for path in leaves if f".{path}".endswith(f".{ending}")]
        if same_end:
            return difflib.get_close_matches(unknown, same_end, n=1, cutoff=0.0)[0]
    guesses = difflib.get_close_matches(unknown, leaves, n=1)
    if not guesses:
        by_name = {path.rsplit(".", 1)[-1]: path for path in leaves}
        guesses = [by_name[guess] for guess in difflib.get_close_matches(parts[-1], by_name, n=1)]
    return guesses[0] if guesses else None
