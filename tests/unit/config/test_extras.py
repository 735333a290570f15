"""How to install what is missing: a command that works where rloom is."""

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from rloom import extras
from tests.architecture.source import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["ray", "wandb", "swanlab", "mlflow", "trackio", "sglang", "megatron"])
def test_in_a_clone_it_is_the_clones_extra_with_its_versions(extra: str) -> None:
    command = shlex.split(extras.install_command(extra))
    assert command == [
        *(sys.executable, "-m", "pip", "install"),
        *("--constraint", f"{ROOT}/constraints.txt", "--editable", f"{ROOT}[{extra}]"),
    ]
    assert extra in EXTRAS


def test_without_an_extra_it_is_rloom_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shlex.split(extras.install_command())[-2:] == ["--editable", str(ROOT)]
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    assert extras.install_command() == f"{shlex.quote(sys.executable)} -m pip install rloom"


@pytest.mark.parametrize("extra", ["test", "sglang"])
def test_the_extras_that_published_commands_name_exist(extra: str) -> None:
    """`pip install -e .[test,sglang]`: pip only warns about an extra that does not exist."""
    assert EXTRAS[extra]


def test_elsewhere_it_is_the_library_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=2", "ray>=2.50; extra == 'ray'", 'wandb>=0.19; extra == "wandb"']
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    monkeypatch.setattr(extras, "requires", lambda name: declared)
    assert extras.install_command("ray") == f"{shlex.quote(sys.executable)} -m pip install 'ray>=2.50'"


@pytest.mark.parametrize("extra", ["ray", "wandb", "swanlab", "mlflow", "trackio", "sglang", "megatron"])
def test_every_library_of_an_extra_is_pinned(extra: str) -> None:
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {requirement.split(">")[0] for requirement in EXTRAS[extra]} <= pinned
