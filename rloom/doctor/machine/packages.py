"""Installed packages: versions, what they require of each other, and whether they can be imported."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rloom.extras import CLONE

PROBE = Path(__file__).with_name("probe.py")
IMPORT_LIMIT_S = 120.0


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def declared(extra: str | None = None) -> list[Requirement]:
    """What rloom itself requires: in a clone by its pyproject.toml, otherwise by the installed metadata."""
    file = CLONE / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        lines = project["dependencies"] if extra is None else project["optional-dependencies"].get(extra, [])
        return [Requirement(line) for line in lines]
    return [each for each in required_by("rloom", extra) if extra is None or "extra" in str(each.marker)]


def required_by(name: str, extra: str | None = None) -> list[Requirement]:
    """The requirements of an installed package that apply to this machine."""
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # some packages publish lines that pip accepts and the standard does not
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""}):
            found.append(requirement)
    return found


@dataclass(frozen=True)
class Conflict:
    package: str  # that has the requirement
    requirement: str
    found: str | None  # installed version; None: not installed

    def __str__(self) -> str:
        state = "is not installed" if self.found is None else f"{self.found} is installed"
        return f"{self.package} requires {self.requirement}; {state}"


def conflicts(package: str, requirements: Iterable[Requirement], *, missing: bool = True) -> list[Conflict]:
    """The requirements that installed versions do not satisfy. `missing`: also packages that are not installed."""
    found = []
    for requirement in requirements:
        if canonicalize_name(requirement.name) == "rloom":
            continue
        installed = installed_version(requirement.name)
        if installed is None:
            if missing:
                found.append(Conflict(package, f"{requirement.name}{requirement.specifier}", None))
        elif not requirement.specifier.contains(installed, prereleases=True):
            found.append(Conflict(package, f"{requirement.name}{requirement.specifier}", installed))
    return found


@dataclass(frozen=True)
class Probe:
    """The result of importing some modules in another process."""

    failed: str | None = None  # module
    error: str = ""
    packages: Sequence[str] = ()  # in the traceback
    facts: Mapping[str, Any] = field(default_factory=dict)


class Imports:
    """Imports in processes that run at the same time. Use the results after the block."""

    def __init__(self, wanted: Mapping[str, Sequence[str]]) -> None:
        self.processes = {
            name: subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", str(PROBE), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, modules in wanted.items()
        }

    def results(self) -> dict[str, Probe]:
        return {name: outcome(process) for name, process in self.processes.items()}


def outcome(process: "subprocess.Popen[str]") -> Probe:
    modules = " ".join(map(str, list(process.args)[5:]))  # type: ignore[arg-type]
    try:
        printed, errors = process.communicate(timeout=IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Probe(modules, f"the import did not end within {IMPORT_LIMIT_S:.0f} s")
    lines = printed.splitlines()
    if process.returncode or not lines:
        last = errors.strip().splitlines()[-1:] or ["it printed nothing"]
        return Probe(modules, f"the importing process ended with {process.returncode}: {last[0]}")
    answer = json.loads(lines[-1])
    return Probe(answer.get("failed"), answer.get("error", ""), answer.get("packages", ()), answer)
