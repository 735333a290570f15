"""What a command finds wrong without torch is reported without torch, and the first line comes before it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloom import __version__
from rloom.config import checks
from rloom.config.load import load_config
from rloom.trainer.main_ppo import train
from tests.architecture.source import ROOT

# each list of arguments as a command: its exit status, what it imported, and what it wrote to stderr
COMMANDS = """
import contextlib, io, json, sys
from rloom.cli import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as written, contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments)
    imported = [name for name in ("torch", "transformers", "ray") if name in sys.modules]
    print(json.dumps([status, imported, written.getvalue()]))
"""
NO_RAY = (
    "import importlib.machinery, sys\n"
    "import importlib.util as u; real = u.find_spec\n"
    "u.find_spec = lambda name, *rest: None if name == 'ray' else real(name, *rest)\n"
)
FAULTS = {
    "train data.train_files=absent.parquet": "data error: data.train_files: absent.parquet: no such file",
    "train data.val_files=[embedded,b.jsonl]": "data error: data.val_files: b.jsonl: no such file",
    "kit data.train_files=absent.json": "data error: data.train_files: absent.json: no such file",
    "train actor_rollout_ref.model.path=./absent": "model.path=./absent: there is no such folder",
    "train actor_rollout_ref.model.path=some/model": "some/model: there is no such folder, and HF_HUB_OFFLINE is set",
    "train critic.model.path=./absent": "critic.model.path=./absent: there is no such folder",
    "train reward_model.path=./absent": "reward_model.path=./absent: there is no such folder",
    "train custom_reward_function.path=absent.py": "reward error: custom_reward_function.path='absent.py'",
    "train actor_rollout_ref.actor.ppo_mini_batch_size=7": "ppo_mini_batch_size=7 (prompts) does not divide",
    "train trainer.default_local_dir=/dev/null/run": "trainer.default_local_dir=/dev/null/run: /dev/null is a file",
    "eval absent": "checkpoint error: absent is not a checkpoint of rloom",
    "export absent folder": "checkpoint error: absent is not a checkpoint of rloom",
}


def run(folder: Path, code: str, *commands: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RLOOM_"))}
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps([command.split() for command in commands])],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def refusals(folder: Path, code: str, *commands: str) -> list[str]:
    """What each wrote, after a check that it ended with status 2 and without torch."""
    done = run(folder, code, *commands)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(status, imported) for status, imported, _ in found] == [(2, [])] * len(commands)
    assert not any("loading torch" in written for *_, written in found)
    return [written for *_, written in found]


def test_errors_that_need_no_torch_come_before_it(tmp_path: Path) -> None:
    for expected, written in zip(FAULTS.values(), refusals(tmp_path, COMMANDS, *FAULTS), strict=True):
        assert expected in written


def test_workers_of_ray_without_it_are_refused_before_torch(tmp_path: Path) -> None:
    [written] = refusals(tmp_path, NO_RAY + COMMANDS, "train trainer.n_gpus_per_node=2 trainer.backend=ray")
    assert "need Ray, which is not installed" in written


def test_the_first_line_comes_before_torch_and_describes_the_run(tmp_path: Path) -> None:
    """With torch out of reach, the command ends after its first line."""
    without = (
        "import json, sys; sys.modules['torch'] = None; from rloom.cli import main; main(json.loads(sys.argv[1])[0])"
    )
    done = run(tmp_path, without, "train data.train_batch_size=64 data.seed=1")
    first = done.stderr.splitlines()[0]
    assert first.startswith("[") and f"s] rloom {__version__} · gae on embedded · 64 × 8 answers a step" in first
    assert first.endswith("loading torch and transformers ...")
    assert "ModuleNotFoundError" in done.stderr


class Stopped(Exception):
    pass


def test_the_keys_of_a_run_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    for name in ("all_faults", "without_effect"):
        rule = getattr(checks, name)
        monkeypatch.setattr(checks, name, lambda *given, name=name, rule=rule: counted.append(name) or rule(*given))

    def stop(*given: object) -> None:
        raise Stopped

    monkeypatch.setattr("rloom.launch.build.read_inputs", stop)  # what comes after all checks of the configuration
    own = tmp_path / "mine.py"
    own.write_text("from rloom.algos.registry import ALGORITHMS\nmine = ALGORITHMS['rloo'].advantage\n")
    for number, estimator in enumerate(("gae", f"{own}:mine")):
        counted.clear()
        folder = f"trainer.default_local_dir={tmp_path}/run{number}"
        with pytest.raises(Stopped):
            train(load_config([folder, "trainer.device=cpu", f"algorithm.adv_estimator={estimator}"]))
        assert sorted(counted) == ["all_faults", "without_effect"]
