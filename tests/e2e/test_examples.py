"""Every example script with RLOOM_SMOKE=1: two steps with a tiny model, from the script's own keys to a checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloom.config import smoke
from rloom.trainer import main_ppo
from tests.e2e.runs import records
from tests.unit.test_config_examples import EXAMPLES, MEGATRON, SCRIPTS, command_of


@pytest.fixture
def smoke_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process, as where Ray is not installed: a cluster for each script would take half a minute."""
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.setattr(smoke, "examine", lambda environment: smoke.Available(0, False, False, environment))
    monkeypatch.setattr("rloom.trainer.run.draw_learning_curve", lambda metrics_file, picture: picture)  # slow
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("smoke_mode")
@pytest.mark.parametrize("script", [*SCRIPTS, MEGATRON])
def test_a_script_trains_two_steps(script: str, tmp_path: Path) -> None:
    _, _, *overrides = command_of(script, tmp_path)
    assert main_ppo.main(overrides) == 0
    [folder] = (tmp_path / "checkpoints").glob("**/smoke")
    steps = [record for record in records(folder) if "critic/score/mean" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert (folder / "global_step_2" / "actor").is_dir()


@pytest.mark.slow
def test_bash_runs_a_script_with_two_workers_of_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    done = subprocess.run(
        ["bash", str(EXAMPLES / "ppo_trainer" / "run_gemma.sh"), "trainer.device=cpu"],
        env={
            **os.environ,
            "RLOOM_SMOKE": "1",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(EXAMPLES.parent),
            "RAY_AUTH_MODE": "disabled",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "trainer.default_local_dir: checkpoints/gemma2b_function_rm -> checkpoints/gemma2b_function_rm/smoke"
        in done.stdout
    )
    assert "worker 1: process" in done.stderr  # of two
    assert "step 2/2" in done.stdout
    assert (tmp_path / "checkpoints" / "gemma2b_function_rm" / "smoke" / "global_step_2" / "critic").is_dir()
