"""The tables of OpenRLHF's flags: openrlhf_flags.yaml (accepted) and openrlhf_refused.yaml (without a meaning here)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parent
VALUES = {"switch": 0, "two floats": 2}  # kind -> how many values it takes; 1 for the others


@dataclass(frozen=True)
class Flag:
    classic: str | None  # name in releases up to 0.9
    dotted: str | None  # name in 0.11
    kind: str  # int, float, text, switch, two floats, texts
    default: Any  # OpenRLHF's; None: it has none
    keys: Sequence[str]
    english: str
    chinese: str
    choices: Sequence[str] = ()
    plain: bool = False  # a given value goes to `keys` unchanged, and an absent flag sets nothing

    @property
    def names(self) -> list[str]:
        return [name for name in (self.classic, self.dotted) if name is not None]

    @property
    def name(self) -> str:
        return self.names[0]

    def meaning(self, chinese: bool) -> str:
        return self.chinese if chinese else self.english


@dataclass(frozen=True)
class Section:
    english: str
    chinese: str
    flags: Sequence[Flag]


@dataclass(frozen=True)
class RefusedFlag:
    names: Sequence[str]
    values: int
    reason: str
    harmless: Sequence[str] = ()


@cache
def sections() -> list[Section]:
    rows = yaml.safe_load((TABLES / "openrlhf_flags.yaml").read_text(encoding="utf-8"))
    return [Section(row["english"], row["chinese"], [Flag(**flag) for flag in row["flags"]]) for row in rows]


@cache
def flags() -> dict[str, Flag]:
    """By each of their names."""
    return {name: flag for section in sections() for flag in section.flags for name in flag.names}


@cache
def refused() -> dict[str, RefusedFlag]:
    rows = yaml.safe_load((TABLES / "openrlhf_refused.yaml").read_text(encoding="utf-8"))
    return {name: RefusedFlag(**row) for row in rows for name in row["names"]}
