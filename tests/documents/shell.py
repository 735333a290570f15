"""What the shell makes of a printed command: the arguments and variables with which a program is started."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.documents.printed import ROOT, Printed

# Python and train.sh are replaced by a program that writes its arguments and its environment to a file.
RECORDER = '#!/bin/sh\n{ printf "%s\\0" "$@" --; env -0; } > "$RECORD"\n'
PROGRAMS = ("python3 -m rloom.trainer.main_ppo", "./train.sh", "bash ")


@dataclass(frozen=True)
class Command:
    """A command that trains, with the statements before it that set variables or the directory."""

    document: str
    text: str
    before: Sequence[str] = ()

    @property
    def name(self) -> str:
        return f"{self.document} {self.text}"

    @property
    def is_kit(self) -> bool:
        return "./train.sh" in self.text


@dataclass(frozen=True)
class Started:
    arguments: list[str]
    variables: Mapping[str, str]


def commands(printed: Sequence[Printed]) -> Iterator[Command]:
    before: list[str] = []
    for entry in printed:
        if entry.language != "bash":
            continue
        if sets_only(entry.renamed):
            before.append(entry.renamed)
            continue
        if any(program in entry.renamed for program in PROGRAMS):
            yield Command(entry.document, entry.renamed, tuple(before))
        before = []


def sets_only(statement: str) -> bool:
    """`export A=b`, `a=b`, `cd folder`; a key of the configuration has a dot."""
    name, equals, value = statement.removeprefix("export ").partition("=")
    return statement.startswith("cd ") or (bool(equals) and name.isidentifier() and " ./" not in value)


def start(command: Command, folder: Path) -> Started:
    """`folder` becomes the home directory and, for train.sh, the current one."""
    recorder = folder / "train.sh"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in ("python3", "python"):
        (programs / name).unlink(missing_ok=True)
        (programs / name).symlink_to(recorder)
    where = folder if command.is_kit else ROOT
    if command.document == "004":  # it is printed on the page of its folder
        where = ROOT / "examples" / "ppo_trainer"
    record = folder / "record"
    environment = {
        "HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": str(programs / "python3"),
        "RECORD": str(record),
    }  # fmt: skip
    script = "\n".join(["set -e", *command.before, command.text])
    subprocess.run(["bash", "-c", script], cwd=where, env=environment, check=True, timeout=300)
    words = record.read_bytes().decode().split("\0")
    end = words.index("--")
    variables = dict(word.split("=", 1) for word in words[end + 1 : -1])
    arguments = words[:end]
    return Started(arguments if command.is_kit else arguments[2:], {**variables, "PATH": os.environ["PATH"]})
