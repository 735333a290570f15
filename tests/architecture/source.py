"""The repository as text and syntax trees, for tests that read it. Nothing of rloom is imported here."""

import fnmatch
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.shape import ROOT, Module, Tree, called_name, parse, under

__all__ = ["ROOT", "TREE", "Module", "called_name", "files", "modules", "parse", "python_files", "texts", "under"]

TREE = Tree(ROOT)


def modules() -> tuple[Module, ...]:
    return TREE.modules


def module_names() -> frozenset[str]:
    return TREE.modules[0].known


def package_files() -> list[Path]:
    """The modules; a Python file below assets/ is a file that train.sh copies for its user."""
    found = sorted((ROOT / "rloom").rglob("*.py"))
    return [file for file in found if not file.is_relative_to(ROOT / "rloom" / "assets")]


def python_files() -> list[Path]:
    return [file for file in files() if file.suffix == ".py"]


@cache
def files() -> tuple[Path, ...]:
    """Every file that belongs to the repository: all but what .gitignore names."""
    found = []
    for folder, below, names in os.walk(ROOT):
        below[:] = [name for name in below if not is_ignored(Path(folder, name))]
        found += [Path(folder, name) for name in names if not is_ignored(Path(folder, name))]
    return tuple(sorted(found))


def is_ignored(path: Path) -> bool:
    """As git reads the simple patterns we use: `name/` anywhere, `/name/` at the top only."""
    place = f"/{path.relative_to(ROOT)}"
    return path.name == ".git" or any(
        fnmatch.fnmatch(place if pattern.startswith("/") else path.name, pattern.rstrip("/")) for pattern in ignored()
    )


@cache
def ignored() -> tuple[str, ...]:
    return tuple((ROOT / ".gitignore").read_text().split())


def texts() -> Iterator[tuple[Path, str]]:
    """Every file that is text, with its content."""
    for file in files():
        try:
            yield file, file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
