"""Files of the current folder replace no module: of the standard library, of a package, of rloom."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloom.import_path import OWN_FOLDER, RAY_WORKER, DriverFolders, child_command, set_back_current_folder
from rloom.plugins import load_plugin
from rloom.rewards.pool import RulePool
from rloom.types import Sample, Score

SHADOWS = ("asyncio", "types", "typing", "code", "random", "json", "torch", "numpy", "dataclasses", "rloom", "sympy")
SHADOW = "open({trace!r}, 'a').write(__name__)\nraise SystemExit(__name__)\n"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has modules that leave this file behind."""
    folder, trace = tmp_path / "here", tmp_path / "trace"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(SHADOW.format(trace=str(trace)))
    monkeypatch.chdir(folder)
    return trace


def scores(pool: RulePool, *samples: Sample) -> list[Score]:
    with contextlib.closing(pool):
        return [score for [score] in asyncio.run(pool.score([(sample,) for sample in samples]))]


def test_rules_score_in_a_folder_with_names_of_the_standard_library(trace: Path) -> None:
    found = scores(
        RulePool(num_workers=1, timeout_s=10),
        Sample("openai/gsm8k", "p", "#### 42", "42", {}),
        Sample("lighteval/MATH", "p", r"\boxed{\frac{1}{2}}", "0.5", {}),
    )
    assert [score.value for score in found] == [1.0, 1.0]
    assert not trace.exists()


FUNCTION = """
import random, types
import beside
from scoring import types as own_types

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    import late  # found when the function runs, too
    assert random.randint(1, 1) == 1 and types.SimpleNamespace(a=1).a == 1
    return beside.VALUE + late.VALUE + own_types.VALUE
"""


def test_a_users_file_imports_its_neighbours_and_they_replace_no_module(trace: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    (own / "scoring").mkdir(parents=True)
    (own / "types.py").write_text(SHADOW.format(trace=str(trace)))
    (own / "scoring" / "types.py").write_text("VALUE = 4\n")
    (own / "beside.py").write_text("VALUE = 1\n")
    (own / "late.py").write_text("VALUE = 2\n")
    (own / "reward.py").write_text(FUNCTION)
    pool = RulePool(num_workers=1, timeout_s=10, path=str(own / "reward.py"))
    assert scores(pool, Sample("any", "p", "", "", {})) == [Score(7.0)]
    assert not trace.exists()


def test_a_file_with_an_estimator_imports_its_neighbours(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "gain_beside_it.py").write_text("GAIN = 3\n")
    (tmp_path / "estimator.py").write_text("import random\nfrom gain_beside_it import GAIN\n")
    try:
        assert load_plugin("algorithm.adv_estimator", f"{tmp_path / 'estimator.py'}:GAIN") == 3
    finally:
        sys.path.remove(str(tmp_path))
    assert not trace.exists()


@pytest.mark.parametrize("command", [["-m", "rloom"], ["-u", "-m", "rloom.cli.train_ppo_ray"]])
def test_python_m_takes_no_module_from_the_current_folder(trace: Path, command: list[str]) -> None:
    (trace.parent / "here" / "rloom.py").unlink()  # Python runs that one, before rloom can do anything
    if "rloom" in command:
        found = subprocess.run([sys.executable, *command, "config", "data.seed"], capture_output=True, text=True)
        assert found.stdout.startswith("data.seed (int, default 1)")
    else:
        found = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "") and not trace.exists()


def test_a_clone_without_an_installation_starts_its_children(tmp_path: Path) -> None:
    """-S: without site-packages, where this environment has rloom."""
    said = "import rloom.import_path, sys; print(rloom.import_path.OWN_FOLDER, sys.path[-1], sys.flags.safe_path)"
    (tmp_path / "rloom").symlink_to(Path(OWN_FOLDER) / "rloom")
    (tmp_path / "show_path.py").write_text(f"def main():\n    {said}\n")
    command = child_command("show_path")
    command[command.index(OWN_FOLDER)] = str(tmp_path)
    found = subprocess.run([command[0], "-S", *command[1:]], capture_output=True, text=True, cwd="/")
    assert (found.stdout.split(), found.stderr) == ([str(tmp_path), str(tmp_path), "True"], "")


RAY = os.path.join("/env", RAY_WORKER)
RAY_FOLDERS = ["/env/ray/thirdparty_files", "/env/ray/_private/workers"]


@pytest.mark.parametrize(
    ("argv", "command", "path", "expected"),
    [
        (["-m"], ["python", "-m", "rloom", "train"], ["/here", "/lib"], ["/lib"]),
        (["-m"], ["python", "-u", "-m", "rloom.trainer.sft_trainer"], [OWN_FOLDER, "/lib"], ["/lib", OWN_FOLDER]),
        (["-m"], ["python", "-m", "my_package.train"], ["/here", "/lib"], ["/here", "/lib"]),
        (["/here/train.py"], ["python", "train.py"], ["/here", "/lib"], ["/here", "/lib"]),
        ([""], ["python"], ["", "/lib"], ["", "/lib"]),
        ([RAY], ["python", RAY], ["/here", "/bin", *RAY_FOLDERS, "/lib"], [*RAY_FOLDERS, "/lib", "/here", "/bin"]),
        ([RAY], ["python", RAY], ["/lib"], ["/lib"]),
    ],
)
def test_the_current_folder_is_not_first(argv: list[str], command: list[str], path: list[str], expected: list[str]):
    set_back_current_folder(path, argv, command)
    assert path == expected


def test_rloom_itself_comes_before_the_current_folder_in_rays_workers() -> None:
    """Ray puts each folder of the list before the earlier ones."""
    folders = DriverFolders(["own"])
    folders.extend(["script", "current"])
    assert folders == ["script", "current", "own"]
