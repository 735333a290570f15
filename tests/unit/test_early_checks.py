"""What a command finds wrong without torch is reported without torch, and the first line comes before it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloom import __version__
from tests.architecture.source import ROOT

COMMAND = """
import sys
from rloom.cli import main
status = main(sys.argv[1:])
print(status, [name for name in ("torch", "transformers", "ray") if name in sys.modules])
"""
# stands for torch: the command has reached the libraries
NO_TORCH = "import sys; sys.modules['torch'] = None\n"


def run(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RLOOM_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "data.train_files=absent.parquet"], "data error: data.train_files: absent.parquet: no such file"),
        (["train", "data.val_files=[embedded,b.jsonl]"], "data error: data.val_files: b.jsonl: no such file"),
        (["kit", "data.train_files=absent.json"], "data error: data.train_files: absent.json: no such file"),
        (["train", "actor_rollout_ref.model.path=./absent"], "model.path=./absent: there is no such folder"),
        (["train", "actor_rollout_ref.model.path=some/model"], "model.path=some/model: HF_HUB_OFFLINE is set"),
        (["train", "critic.model.path=./absent"], "critic.model.path=./absent: there is no such folder"),
        (["train", "reward_model.path=./absent"], "reward_model.path=./absent: there is no such folder"),
        (["train", "custom_reward_function.path=absent.py"], "reward error: custom_reward_function.path='absent.py'"),
        (["train", "actor_rollout_ref.actor.ppo_mini_batch_size=7"], "ppo_mini_batch_size=7 (prompts) does not divide"),
        (
            ["train", "trainer.default_local_dir=/dev/null/run"],
            "trainer.default_local_dir=/dev/null/run: /dev/null is a file",
        ),
        (["eval", "absent"], "checkpoint error: absent is not a checkpoint of rloom"),
        (["export", "absent", "folder"], "checkpoint error: absent is not a checkpoint of rloom"),
    ],
)
def test_an_error_that_needs_no_torch_comes_before_it(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run(tmp_path, COMMAND, *arguments)
    assert done.stdout.splitlines()[-1] == "2 []"
    assert said in done.stderr
    assert "loading torch" not in done.stderr


def test_several_workers_without_ray_are_refused_before_torch(tmp_path: Path) -> None:
    without = "import importlib.machinery, sys\n" + (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'ray' else real(name, *rest)\n"
    )
    done = run(tmp_path, without + COMMAND, "train", "trainer.n_gpus_per_node=2")
    assert done.stdout.splitlines()[-1] == "2 []"
    assert "needs Ray" in done.stderr or "Ray, which is not installed" in done.stderr


def test_the_first_line_comes_before_torch_and_describes_the_run(tmp_path: Path) -> None:
    """With torch out of reach, the command ends after its first line."""
    done = run(tmp_path, NO_TORCH + COMMAND, "train", "data.train_batch_size=64", "data.seed=1")
    first = done.stderr.splitlines()[0]
    assert first.startswith("[") and f"s] rloom {__version__} · gae on embedded · 64 × 8 answers a step" in first
    assert first.endswith("loading torch and transformers ...")
    assert "ModuleNotFoundError" in done.stderr
