"""Each of the 337 entries that works: its command, key, flag, file, metric or test is there."""

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from rloom.config.dialects import kit
from rloom.config.dialects.openrlhf_flags import flags as openrlhf_flags
from rloom.config.keys import all_keys
from tests.documents.entries import STATES, WORKS, Check, Entry, page, read
from tests.documents.printed import MISSION, ROOT
from tests.documents.test_commands import COMMANDS, FRAGMENTS, PRINTED
from tests.documents.test_programs import RUN, TENSORBOARD
from tests.e2e.runs import records, train

ENTRIES = read()[1]
CHECKS = dict.fromkeys(check for entry in ENTRIES for check in entry.checks if check.kind in WORKS)
AUDIT = MISSION.parent / "AUDIT.md"
LANGUAGES = {"": 0, ".zh": 1}


@cache
def functions_of_tests() -> frozenset[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return frozenset(name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M))


@cache
def kit_variables() -> set[str]:
    return {found.variable for found in kit.FLAGS.values() if found.variable} | set(kit.VARIABLES)


@cache
def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


FOUND: dict[str, Callable[[str], bool]] = {
    "command": lambda text: any(text in command.text for command in COMMANDS),
    "run": lambda text: text == TENSORBOARD or any(text in statement for statement in RUN),
    "key": lambda text: text in all_keys(),
    "keys": lambda text: text in " ".join(FRAGMENTS),
    "yaml": lambda text: any(entry.document == text for entry in PRINTED if entry.language == "yaml"),
    "flag": lambda text: text.removeprefix("--") in kit.FLAGS,
    "variable": lambda text: text in kit_variables(),
    "openrlhf": lambda text: text.removeprefix("--") in {name.removeprefix("--") for name in openrlhf_flags()},
    "extra": lambda text: set(text.split(",")) <= extras(),
    "file": lambda text: (ROOT / text).exists(),
    "page": lambda text: (ROOT / text).is_file() and (ROOT / text.replace(".md", ".zh.md")).is_file(),
    "test": lambda text: text in functions_of_tests(),
}


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c.kind != "metric"], ids=lambda check: f"{check.kind} {check.argument}"
)
def test_what_an_entry_refers_to_is_there(check: Check) -> None:
    assert FOUND[check.kind](check.argument)


def test_the_metrics_of_the_documents_are_those_of_a_run(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, "algorithm.use_kl_in_reward=True")
    [record] = [record for record in records(tmp_path / "run") if record["step"] == 1]
    assert {check.argument for check in CHECKS if check.kind == "metric"} <= record.keys()


def test_every_entry_works_or_has_one_reason_why_not() -> None:
    assert len(ENTRIES) == 337
    for entry in ENTRIES:
        kinds = [check.kind for check in entry.checks]
        assert kinds and (set(kinds) <= WORKS.keys() or (len(kinds) == 1 and kinds[0] in STATES)), entry.number


@pytest.mark.skipif(not AUDIT.is_file(), reason="the audit is not beside this clone")
def test_no_entry_of_the_audit_is_left_out() -> None:
    rows = re.findall(r"^\| (\d{3}-\d+) \| ", AUDIT.read_text(encoding="utf-8"), re.M)
    assert rows
    assert set(rows) <= {entry.number for entry in ENTRIES}


@pytest.mark.parametrize("suffix", LANGUAGES)
def test_the_page_is_the_one_that_the_table_makes(suffix: str) -> None:
    file = ROOT / "docs" / f"coming-from-the-documents{suffix}.md"
    assert file.read_text(encoding="utf-8") == page(LANGUAGES[suffix]), "run `make docs`"


def test_an_entry_with_a_reason_has_its_state() -> None:
    entry = Entry("000-01", "a thing", (Check("gpus", "it needs them"),))
    assert (entry.state(0), entry.state(1)) == ("needs GPUs", "需要 GPU")
