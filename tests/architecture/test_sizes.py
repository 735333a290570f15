"""Files and functions of a size that can be read, folders that can be looked over, one class for a name."""

import ast
import re
from collections import Counter
from pathlib import Path

from tests.architecture.source import ROOT, TREE, called_name, parse, python_files, texts, under

MAX_LINES_A_FILE = 600
MAX_LINES_A_FUNCTION = 60
MAX_FILES_A_FOLDER = 20
FEWEST_LINES = 40  # of a file that a single module imports, which is in its own folder
VERLS_PATHS = "rloom.trainer"  # import paths that scripts for verl name: they stay, however short

# Exceptions, to be emptied: a name that is not needed any more may be removed at any time.
LARGE_FOLDERS: set[str] = set()
FRAGMENTS: set[str] = {
    "rloom.rollout.vllm.engine",  # the only module that imports both vLLM and torch.distributed
}
CIRCULAR: set[str] = set()
REPEATED_CLASSES: set[str] = set()


def test_no_file_is_over_600_lines() -> None:
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES_A_FILE} == {}
    assert len(lengths) > 50  # the search finds something


def test_no_function_is_over_60_lines() -> None:
    found = {
        f"{file.relative_to(ROOT)}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file in python_files()
        for node in ast.walk(parse(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in found.items() if lines > MAX_LINES_A_FUNCTION} == {}


def test_no_folder_has_more_than_20_files() -> None:
    large = {folder for folder, files in TREE.files_per_folder().items() if files > MAX_FILES_A_FOLDER}
    assert large - LARGE_FOLDERS == set()


def test_a_short_file_with_one_importer_in_its_folder_is_part_of_that_importer() -> None:
    found = {name for name in TREE.fragments(FEWEST_LINES) if not under(name, VERLS_PATHS)}
    assert found - FRAGMENTS == set()


def test_no_class_name_exists_twice() -> None:
    found = TREE.repeated_classes()
    assert {name: places for name, places in found.items() if name not in REPEATED_CLASSES} == {}


def test_no_two_files_of_unit_tests_have_one_name() -> None:
    """Their folders are no packages: pytest imports them by their names alone, and groups them by these."""
    names = Counter(file.name for file in (ROOT / "tests" / "unit").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_make_no_circle() -> None:
    assert [circle for circle in TREE.import_circles() if not CIRCULAR.issuperset(circle)] == []


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file, text in texts()
        if file.suffix in (".py", ".sh", ".md", ".yaml", ".toml", "") and file != Path(__file__)
        for number, line in enumerate(text.splitlines(), start=1)
        if marks.search(line)
    ]
    assert found == []


def test_no_object_is_asked_what_it_has() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in python_files()
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call) and called_name(node) == "hasattr"
    ]
    assert found == [], "put it into the protocol, or do not call it"
