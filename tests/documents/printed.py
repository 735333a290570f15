"""The commands and YAML blocks that the users' documents print.

`printed.yaml` is a copy of them, since the documents need not be beside a clone; `python -m tests.documents.printed`
writes it. Comments are left out. Nothing is changed but the name of the package, and that only when it is read.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rloom.tables import LOADER

ROOT = Path(__file__).parents[2]
MISSION = ROOT.parent / "shared" / "mission"
COPY = Path(__file__).with_name("printed.yaml")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
OTHER_NAME = re.compile(r"(?<![\w-])verl(?=[./_])|(?<=import )verl\b|(?<=print\()verl\b|(?<=\s)verl(?=/)")
# a benchmark's block without a language: the command stands on its own lines below a heading
BARE_COMMAND = re.compile(r"^bash \S+(?:.*\\\n)*.*", re.M)


@dataclass(frozen=True)
class Printed:
    """A statement of a shell block, or a whole YAML block."""

    document: str
    language: str  # bash or yaml
    text: str

    @property
    def renamed(self) -> str:
        return OTHER_NAME.sub("rloom", self.text).replace(
            "数\N{REPLACEMENT CHARACTER}准备", "数据准备"
        )  # damaged encoding


@cache
def copied() -> list[Printed]:
    return [Printed(**entry) for entry in yaml.load(COPY.read_text(encoding="utf-8"), LOADER)]


def in_documents() -> list[Printed]:
    found = []
    for file in sorted(MISSION.glob("00*")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".html":
            found += [Printed(file.stem, "bash", code) for code in re.findall(r"<code>(bash [^<]+)</code>", text)]
        for language, block in BLOCK.findall(text):
            found += [Printed(file.stem, *statement) for statement in statements_of(language, block)]
    return found


def statements_of(language: str, block: str) -> Iterator[tuple[str, str]]:
    if language == "bash":
        yield from (("bash", statement) for statement in shell_statements(block))
    elif language == "yaml":
        lines = [re.sub(r"(^|\s+)#.*", "", line).rstrip() for line in block.splitlines()]
        if not any(line.startswith("- ") for line in lines):  # a list of metrics is no configuration
            yield "yaml", "\n".join(line for line in lines if line) + "\n"
    elif not language:
        yield from (("bash", without_continuations(found)) for found in BARE_COMMAND.findall(block))


def shell_statements(block: str) -> Iterator[str]:
    """Lines of a shell script, each with its continuations and the lines of an open quotation."""
    held = ""
    for line in block.splitlines():
        if not held and line.lstrip().startswith("#"):
            continue
        held += line + "\n"
        if held.count('"') % 2 == 0 and not line.endswith("\\"):
            if held.strip():
                yield without_continuations(without_comment(held).strip())
            held = ""
    if held.strip():  # document 000 ends with a backslash
        yield without_continuations(held.strip().removesuffix("\\").strip())


def without_comment(statement: str) -> str:
    return statement if '"\n' in statement else re.sub(r"\s+#.*", "", statement)


def without_continuations(statement: str) -> str:
    return re.sub(r"\s*\\\n\s*", " ", statement)


class Literal(yaml.SafeDumper):
    """Texts of several lines as blocks."""


Literal.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def dumped(entries: list[Printed]) -> str:
    rows: list[dict[str, Any]] = [vars(entry) for entry in entries]
    return yaml.dump(rows, Dumper=Literal, allow_unicode=True, sort_keys=False, width=1000)


if __name__ == "__main__":
    sys.stdout.write(dumped(in_documents()))
