"""Each of the 337 entries: its state has a reason, and its command, key, flag, file, metric or test is there."""

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from rloom.config.frontends import train_sh
from rloom.config.frontends.openrlhf_flags import flags as openrlhf_flags
from rloom.config.keys import all_keys
from tests.documents.entries import KINDS, STATES, TRIED, Check, Entry, entry_of, has_words, page, read
from tests.documents.printed import ROOT
from tests.documents.test_commands import COMMANDS, FRAGMENTS, PRINTED
from tests.documents.test_programs import RUN, TENSORBOARD
from tests.e2e.runs import records, train

ENTRIES = read()[1]
CHECKS = dict.fromkeys(check for entry in ENTRIES for check in entry.checks)
LANGUAGES = {"": 0, ".zh": 1}


@cache
def functions_of_tests() -> frozenset[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return frozenset(name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M))


@cache
def kit_variables() -> set[str]:
    return {found.variable for found in train_sh.FLAGS.values() if found.variable} | set(train_sh.VARIABLES)


@cache
def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


FOUND: dict[str, Callable[[str], bool]] = {
    "command": lambda text: any(text in command.text for command in COMMANDS),
    "run": lambda text: text == TENSORBOARD or any(text in statement for statement in RUN),
    "key": lambda text: text in all_keys(),
    "keys": lambda text: text in " ".join(FRAGMENTS),
    "yaml": lambda text: any(entry.document == text for entry in PRINTED if entry.language == "yaml"),
    "flag": lambda text: text.removeprefix("--") in train_sh.FLAGS,
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


def test_every_entry_has_a_state_with_its_reason_and_a_proof() -> None:
    assert len(ENTRIES) == len({entry.number for entry in ENTRIES}) == 337
    for entry in ENTRIES:
        assert entry.state in STATES and {check.kind for check in entry.checks} <= set(KINDS), entry.number
        if entry.state == "works":
            assert not entry.reason and {check.kind for check in entry.checks} - {"command"}, entry.number
        elif entry.state == "small":
            assert entry.checks and entry.reason in {(kind,) for kind in TRIED}, entry.number
        else:
            assert len(entry.reason) == 2, entry.number


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.state != "works"], ids=lambda entry: entry.number)
def test_what_the_guide_lists_is_in_chinese(entry: Entry) -> None:
    english, chinese = entry.what
    assert not has_words(english) or re.search("[一-鿿，：（]", chinese)
    assert entry.state == "small" or re.search("[一-鿿]", entry.reason[1])


@pytest.mark.parametrize("suffix", LANGUAGES)
def test_the_page_is_the_one_that_the_table_makes(suffix: str) -> None:
    file = ROOT / "docs" / f"coming-from-the-documents{suffix}.md"
    assert file.read_text(encoding="utf-8") == page(LANGUAGES[suffix]), "run `make docs`"


def test_a_row_becomes_an_entry() -> None:
    row = {"id": "000-01", "what": "a thing `x`", "zh": "某物 `x`", "state": ["small", "hub"], "checks": ["run ls ~/d"]}
    entry = entry_of(row)
    assert entry == Entry("000-01", ("a thing `x`", "某物 `x`"), "small", ("hub",), (Check("run", "ls ~/d"),))
    assert entry.ran and not entry_of({**row, "checks": ["command ./train.sh", "key data.seed"]}).ran
    assert has_words("a thing `x`") and not has_words("Q1 `x`, `y` 0.1")
