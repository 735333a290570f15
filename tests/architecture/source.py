"""The repository as text and syntax trees, for tests that read it. Nothing of rloom is imported here."""

import ast
import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Module:
    """A Python file of the package."""

    name: str  # rloom.config.load
    tree: ast.Module

    def imports(self) -> tuple[str, ...]:
        """Full names of what it imports, wherever in the file: `from rloom.config import load` -> rloom.config.load."""
        return imports_of(self)


@cache
def imports_of(module: Module) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module.name}: imports are absolute"
            names += [qualified(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and called_name(node) in ("import_module", "import_library"):
            names += [str(part.value) for part in node.args[:1] if isinstance(part, ast.Constant)]
    return tuple(names)


@cache
def modules() -> tuple[Module, ...]:
    return tuple(Module(module_name(file), parse(file)) for file in package_files())


@cache
def module_names() -> frozenset[str]:
    return frozenset(module_name(file) for file in package_files())


def package_files() -> list[Path]:
    """The modules; a Python file below assets/ is a file that train.sh copies for its user."""
    found = sorted((ROOT / "rloom").rglob("*.py"))
    return [file for file in found if not file.is_relative_to(ROOT / "rloom" / "assets")]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def qualified(package: str, name: str) -> str:
    """The module, where `name` is one of `package`; else the package that defines it."""
    whole = f"{package}.{name}"
    return whole if whole in module_names() or not package.startswith("rloom") else package


def called_name(node: ast.Call) -> str:
    """`f` of `f()` and of `a.f()`; an expression that is called has no name."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


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
        fnmatch.fnmatch(place if pattern.startswith("/") else path.name, pattern.rstrip("/"))
        for pattern in (ROOT / ".gitignore").read_text().split()
    )


def texts() -> Iterator[tuple[Path, str]]:
    """Every file that is text, with its content."""
    for file in files():
        try:
            yield file, file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
