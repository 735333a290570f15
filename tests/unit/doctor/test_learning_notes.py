"""The notes in learning_notes/: their Python blocks print, and their plans contain, the text block that follows."""

import io
import re
import shlex
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import pytest

from rloom.cli.plan import main as plan

ROOT = Path(__file__).parents[3]
NOTES = sorted((ROOT / "learning_notes").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(((?!https?:)[^)#\s]+)")


def pairs(note: Path, language: str) -> list[tuple[str, str]]:
    """(code, what is printed below it) of each block in that language."""
    found = BLOCK.findall(note.read_text(encoding="utf-8"))
    return [(code, text) for (kind, code), (_, text) in pairwise(found) if kind == language]


@pytest.mark.parametrize("note", [note for note in NOTES if pairs(note, "python")], ids=lambda note: note.stem)
def test_a_note_prints_what_it_shows(note: Path) -> None:
    names: dict[str, object] = {}
    for code, expected in pairs(note, "python"):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(code, str(note), "exec"), names)
        assert printed.getvalue() == expected


@pytest.mark.parametrize("note", [note for note in NOTES if pairs(note, "bash")], ids=lambda note: note.stem)
def test_a_plan_of_a_note_has_the_lines_it_shows(note: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = [(code, expected) for code, expected in pairs(note, "bash") if code.startswith("rloom plan ")]
    assert plans
    for code, expected in plans:
        assert plan(shlex.split(code.replace("\\\n", " "))[2:]) == 0
        printed = [line.split() for line in capsys.readouterr().out.splitlines()]
        for line in expected.splitlines():
            assert line.split() in printed, line


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem)
def test_every_link_of_a_note_leads_to_a_file(note: Path) -> None:
    missing = [target for target in LINK.findall(note.read_text("utf-8")) if not (note.parent / target).exists()]
    assert missing == []
