"""Keys of the configuration tree: all of them, one by name, and the nearest to an unknown name."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rloom.config.base import NamedIn, NeedsConsent, RunConfig, Section, Switch
from rloom.config.schema import Config
from rloom.config.verl_keys import unsupported_key, unsupported_value
from rloom.plugins import installed, names_in_file

Root = type[RunConfig]  # the tree of a kind of training; the default of every function here is RL training


@dataclass(frozen=True)
class Key:
    """One documented key: `path` is its dotted name."""

    path: str
    field: FieldInfo
    same_run: bool  # another value continues the run: what is trained is the same

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
        return type_name(self.field.annotation) if self.named_in is None else self.named_in.values()

    @property
    def named_in(self) -> NamedIn | None:
        """The table whose names are values of the key."""
        return next((fact for fact in self.field.metadata if isinstance(fact, NamedIn)), None)

    @property
    def needs_consent(self) -> NeedsConsent | None:
        """Whether a checkpoint's value needs the user's consent. None: no value does."""
        consent: NeedsConsent | None = declared(self.field, "needs_consent")
        return consent

    @property
    def switch(self) -> Switch | None:
        found: Switch | None = declared(self.field, "switch")
        return found

    @property
    def takes_any_entry(self) -> bool:
        """A free dictionary, such as `engine_kwargs`, whose entries are not checked."""
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
    if origin.endswith("Annotated"):
        return type_name(arguments[0])
    return " or ".join(type_name(argument) for argument in arguments)


def declared(field: FieldInfo, fact: str) -> Any:
    extra = field.json_schema_extra
    return extra.get(fact) if isinstance(extra, dict) else None


def walk(kind: type[Section] = Config, prefix: str = "", same_run: bool = False) -> Iterator[Key]:
    """Every key; a section comes before its keys. `same_run`: that of the section, unless a key declares its own."""
    for name, field in kind.model_fields.items():
        own = declared(field, "same_run")
        found = Key(prefix + name, field, same_run if own is None else own)
        yield found
        if found.section is not None:
            yield from walk(found.section, f"{prefix}{name}.", found.same_run)


@cache
def all_keys(root: Root = Config) -> dict[str, Key]:
    return {found.path: found for found in walk(root)}


def value_at(config: RunConfig, path: str) -> Any:
    return attrgetter(path)(config)


MOST_GUESSES = 3
# Smallest difflib ratio of a guess: of the name within its section, of the whole key, of the name in any section. A
# wider search requires a higher ratio.
IN_SECTION, WHOLE_KEY, ANYWHERE = 0.6, 0.9, 0.85


def did_you_mean(unknown: str, root: Root = Config) -> str:
    guesses = nearest(unknown, root)
    return f"; did you mean {' or '.join(guesses)}?" if guesses else ""


def nearest(unknown: str, root: Root = Config) -> list[str]:
    """The keys that a misspelt or misplaced one may mean; none if no key is similar enough."""
    leaves = [path for path, found in all_keys(root).items() if found.section is None]
    section, _, name = unknown.rpartition(".")
    namesakes = [path for path in leaves if path.rpartition(".")[2] == name]
    if namesakes:
        return misplaced(unknown, namesakes)
    section_keys = {
        path.rpartition(".")[2]: path for path in leaves if f".{path.rpartition('.')[0]}".endswith(f".{section}")
    }
    similar = difflib.get_close_matches(name, section_keys, n=1, cutoff=IN_SECTION) if section else []
    if similar:
        return [section_keys[similar[0]]]
    whole = difflib.get_close_matches(unknown, leaves, n=1, cutoff=WHOLE_KEY)
    names = {path.rpartition(".")[2]: path for path in reversed(leaves)}
    return whole or [names[guess] for guess in difflib.get_close_matches(name, names, n=1, cutoff=ANYWHERE)]


def misplaced(unknown: str, namesakes: list[str]) -> list[str]:
    """The keys with the same last name that end in `unknown` (`rollout.n`), or share most of its sections."""
    namesakes = [path for path in namesakes if path.endswith(f".{unknown}")] or namesakes
    sections = set(unknown.split(".")[:-1])

    def shared(path: str) -> int:
        return len(sections & set(path.split(".")))

    most = max(map(shared, namesakes))
    guesses = [path for path in namesakes if shared(path) == most]
    near_misses = difflib.get_close_matches(unknown, guesses, n=1, cutoff=WHOLE_KEY)  # a misspelt section
    if near_misses:
        return near_misses
    # several keys have this name (enable, path), and none is in a similar section
    unrelated = bool(sections) and not most and len(guesses) > 1
    return [] if unrelated or len(guesses) > MOST_GUESSES else guesses


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
        return missing.refusal(f"{path}={value!r}")
    return f"{path}: there is no such key{did_you_mean(path, root)} (`{root.listing}` lists them all)"


def wrong_value(found: Key, fault: Any) -> str:
    given = fault["input"]
    missing = unsupported_value(found.path, given)
    if missing is not None:
        return missing.refusal(f"{found.path}={given}")
    if found.section is not None:
        return f"{found.path}={given!r}: it is a section of keys"
    # pydantic lists the choices of a literal, which `found.kind` also does
    reason = "not one of the values it takes" if fault["type"] == "literal_error" else fault["msg"].lower()
    takes, hint = found.kind, ""
    if found.named_in is not None:
        takes = found.named_in.values(*installed(found.named_in.group))
        hint = meant_value(found.named_in, str(given))
    return f"{found.path}={given!r}: {reason}{hint}; it takes {takes}, by default {found.default}"


def meant_value(named: NamedIn, given: str) -> str:
    """A file whose name is followed by none of its own names, or a misspelt entry of the table."""
    if given.endswith(".py"):
        inside = [f"{given}:{name}" for name in names_in_file(given)[:MOST_GUESSES]]
        return f"; did you mean {' or '.join(inside)}?" if inside else ""
    near = difflib.get_close_matches(given, [*named.table, *installed(named.group)], n=1, cutoff=IN_SECTION)
    return f"; did you mean {near[0]}?" if near else ""


def unknown_leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The full keys below an unknown section `path`: `actor` -> `actor.optim.lr`."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for name, below in value.items():
        yield from unknown_leaves(f"{path}.{name}", below)
