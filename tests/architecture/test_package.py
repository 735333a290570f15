"""What is in the working tree is what a clone and an installation get."""

import tomllib
from pathlib import Path

from tests.architecture.source import ROOT, is_ignored, package_files


def test_git_keeps_every_module_of_the_package() -> None:
    lost = [
        str(file.relative_to(ROOT))
        for file in package_files()
        if any(is_ignored(path) for path in (file, *file.parents) if path.is_relative_to(ROOT) and path != ROOT)
    ]
    assert lost == [], "a pattern in .gitignore hides them: anchor it with a leading slash"


def test_every_file_of_the_package_is_installed_with_it() -> None:
    package = ROOT / "rloom"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["rloom"]
    shipped = {file for pattern in patterns for file in package.glob(pattern)}
    others = {f for f in package.rglob("*") if f.is_file() and f.suffix != ".py" and "__pycache__" not in f.parts}
    assert {str(file.relative_to(package)) for file in others - shipped} == set()
    assert all(any(True for _ in package.glob(pattern)) for pattern in patterns), "a pattern finds no file"


def test_every_folder_of_the_package_is_a_package() -> None:
    folders: set[Path] = {file.parent for file in package_files()}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()] == []
