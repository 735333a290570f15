"""Read a command line with OpenRLHF's flags: values by flag, key=value overrides, and every fault."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.config.frontends.openrlhf_flags import VALUES, Flag, flags, refused

TYPES = {"int": int, "float": float, "two floats": float}


@dataclass(frozen=True)
class Given:
    """The flags of a command line. `given["seed"]` is the given value or OpenRLHF's default."""

    values: Mapping[str, Any]  # flag name, the classic one if there is one -> value

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name, flags()[name].default)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def of_role(self, role: str, dotted: str, classic: str | None = None) -> Any:
        """The value of `--actor.x` or `--critic.x`, else that of the classic flag, which counts for both."""
        own = f"{role}.{dotted}"
        return self[own] if own in self or classic is None else self[classic]


@dataclass(frozen=True)
class CommandLine:
    given: Given
    overrides: Sequence[str]
    faults: Sequence[str]


def parse(arguments: Sequence[str]) -> CommandLine:
    values: dict[str, Any] = {}
    overrides: list[str] = []
    faults: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            if "=" in argument:
                overrides.append(argument)
            else:
                faults.append(f"{argument!r} is neither a flag (--name) nor a key=value pair")
            continue
        name, has_value, text = argument[2:].partition("=")
        texts = [text] if has_value else take_values(rest, count_of(name))
        if name in flags():
            read_flag(flags()[name], name, texts, values, faults)
        elif name in refused():
            found = refused()[name]
            if " ".join(texts) not in found.harmless:
                faults.append(f"{' '.join([f'--{name}', *texts])}: {found.reason}")
        else:
            faults.append(unknown_flag(name))
    return CommandLine(Given(values), overrides, faults)


def count_of(name: str) -> int | None:
    """How many values follow a flag. None: all up to the next flag or key=value pair."""
    if name in refused():
        return refused()[name].values
    if name not in flags() or flags()[name].kind == "texts":
        return None
    return VALUES.get(flags()[name].kind, 1)


def take_values(rest: list[str], count: int | None) -> list[str]:
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and (count is None or len(taken) < count):
        if count is None and "=" in rest[0]:
            break
        taken.append(rest.pop(0))
    return taken


def read_flag(flag: Flag, name: str, texts: Sequence[str], values: dict[str, Any], faults: list[str]) -> None:
    needed = count_of(name)
    if needed is not None and len(texts) != needed:
        takes = {0: "no value", 1: "one value", 2: "two values"}[needed]
        faults.append(f"--{name}: it takes {takes}, and {len(texts)} are given")
        return
    try:
        converted = [TYPES[flag.kind](text) if flag.kind in TYPES else text for text in texts]
    except ValueError:
        kind = {"int": "a whole number", "float": "a number", "two floats": "two numbers"}[flag.kind]
        faults.append(f"--{name} {' '.join(texts)}: it takes {kind}")
        return
    if flag.choices and converted[0] not in flag.choices:
        faults.append(f"--{name} {converted[0]}: it takes {', '.join(flag.choices)}")
        return
    if flag.kind == "switch":
        values[flag.name] = True
    else:
        values[flag.name] = converted if flag.kind in ("two floats", "texts") else converted[0]


def unknown_flag(name: str) -> str:
    near = difflib.get_close_matches(name, [*flags(), *refused()], n=1, cutoff=0.5)
    hint = f"; did you mean --{near[0]}?" if near else ""
    return f"--{name}: OpenRLHF has no such flag{hint} (`rloom openrlhf --help` lists them)"
