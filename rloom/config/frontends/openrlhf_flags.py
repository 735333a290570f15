"""OpenRLHF's flags: their tables, openrlhf_flags.yaml (accepted) and openrlhf_refused.yaml (without a meaning here);
a command line with them as values by flag, overrides and faults; and the help of `rloom openrlhf`."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rloom.language import translate
from rloom.tables import read_table

VALUES = {"switch": 0, "two floats": 2}  # kind -> how many values it takes; 1 for the others


@dataclass(frozen=True)
class Flag:
    classic: str | None  # name in releases up to 0.9
    dotted: str | None  # name in 0.11
    kind: str  # int, float, text, switch, two floats, texts
    default: Any  # OpenRLHF's; None: it has none
    keys: Sequence[str]
    meaning: str
    choices: Sequence[str] = ()
    plain: bool = False  # a given value goes to `keys` unchanged, and an absent flag sets nothing

    @property
    def names(self) -> list[str]:
        return [name for name in (self.classic, self.dotted) if name is not None]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class FlagSection:
    title: str
    flags: Sequence[Flag]


@dataclass(frozen=True)
class RefusedFlag:
    names: Sequence[str]
    values: int
    reason: str
    harmless: Sequence[str] = ()
    ignored: bool = False  # other values are accepted with a notice: the result of training is the same


@cache
def sections() -> list[FlagSection]:
    return [FlagSection(row["title"], [Flag(**flag) for flag in row["flags"]]) for row in read_table("openrlhf_flags")]


@cache
def flags() -> dict[str, Flag]:
    """By each of their names."""
    return {name: flag for section in sections() for flag in section.flags for name in flag.names}


@cache
def refused() -> dict[str, RefusedFlag]:
    return {name: RefusedFlag(**row) for row in read_table("openrlhf_refused") for name in row["names"]}


TYPES = {"int": int, "float": float, "two floats": float}


@dataclass(frozen=True)
class GivenFlags:
    """The flags of a command line. `given["seed"]` is the given value or OpenRLHF's default."""

    values: Mapping[str, Any]  # flag name, the classic one if there is one -> value
    dotted: Collection[str] = ()  # those of them that were given by their name in 0.11

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
    given: GivenFlags
    overrides: Sequence[str]
    faults: Sequence[str]
    notices: Sequence[str]


def parse(arguments: Sequence[str]) -> CommandLine:
    values: dict[str, Any] = {}
    overrides: list[str] = []
    faults: list[str] = []
    notices: list[str] = []
    dotted: list[str] = []
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
            dotted += [flags()[name].name] if name == flags()[name].dotted else []
        elif name in refused():
            found = refused()[name]
            if " ".join(texts) not in found.harmless:
                sentence = f"{' '.join([f'--{name}', *texts])}: {found.reason}"
                (notices if found.ignored else faults).append(f"Note: {sentence}" if found.ignored else sentence)
        else:
            faults.append(unknown_flag(name))
    return CommandLine(GivenFlags(values, dotted), overrides, faults, notices)


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


USAGE = """rloom openrlhf [--flag VALUE ...] [key=value ...]

Trains a policy with the flags of OpenRLHF's train_ppo_ray.py, classic or dotted names, and OpenRLHF's defaults.
Every key of `rloom config` can follow as key=value and overrides the flags. The same command:
`python3 -m rloom.cli.train_ppo_ray`. Without --pretrain and --prompt_data: the embedded model and data.
Without a flag of the placement: one worker with all roles."""
OWN_FLAGS = {
    "--print": "print the equivalent `rloom train` command and end",
    "--plan": "print batches, placement, memory and time, and end; starts nothing",
    "-h, --help": "show this help and end",
}
EXAMPLE = (
    "  rloom openrlhf --pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data train.jsonl --input_key prompt \\",
    "      --label_key answer --advantage_estimator rloo --n_samples_per_prompt 4 --print",
)
COLUMN = 34


def help_text() -> str:
    own = (f"  {name:<{COLUMN}}{translate(meaning)}" for name, meaning in OWN_FLAGS.items())
    lines = [translate(USAGE), "", *EXAMPLE, "", *own]
    for section in sections():
        lines += ["", translate(section.title), *(line for flag in section.flags for line in flag_lines(flag))]
    without_meaning = translate("Flags of OpenRLHF without a meaning here; each is refused with its reason:")
    return "\n".join([*lines, "", without_meaning, *wrapped([f"--{name}" for name in refused()])])


def flag_lines(flag: Flag) -> Iterator[str]:
    names = ", ".join(f"--{name}" for name in flag.names)
    has_default = flag.default is not None and flag.kind != "switch"
    shown = f" ({translate(f'default {default_text(flag)}')})" if has_default else ""
    yield f"  {names}"
    yield f"      {translate(flag.meaning)}{shown}"
    if flag.keys:
        yield f"      → {', '.join(flag.keys)}"


def default_text(flag: Flag) -> str:
    return " ".join(map(str, flag.default)) if isinstance(flag.default, list) else str(flag.default)


def wrapped(words: list[str]) -> Iterator[str]:
    line = " "
    for word in words:
        if len(line) + len(word) + 1 > 118:  # columns
            yield line
            line = " "
        line += f" {word}"
    yield line
