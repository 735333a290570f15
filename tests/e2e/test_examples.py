"""The example scripts that no document prints, with RLOOM_SMOKE=1; `documents/test_in_order.py` runs the others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rloom.config.frontends import smoke
from rloom.trainer import main_ppo
from tests.documents.test_commands import COMMANDS
from tests.e2e.runs import records
from tests.shown_output import SHOWN, not_printed, pages_of, pages_with_output
from tests.unit.config.test_config_examples import EXAMPLES, SCRIPTS, command_of

ONE_GPU = "grpo_trainer/run_qwen2.5-0.5b.sh"
OTHERS = ("grpo_trainer/run_qwen2-7b.sh", "grpo_trainer/run_qwen2-7b_lora.sh")


def test_the_other_scripts_are_commands_of_the_documents() -> None:
    texts = [" ".join([*command.before, command.text]) for command in COMMANDS]
    printed = {script for script in SCRIPTS for text in texts if all(part in text for part in script.split("/"))}
    assert printed == SCRIPTS.keys() - {ONE_GPU, *OTHERS}


def test_every_page_that_shows_a_run_is_compared_with_one() -> None:
    assert SHOWN.keys() <= {ONE_GPU, *(command.name for command in COMMANDS)}
    assert {page for run in SHOWN for page in pages_of(run)} == pages_with_output()


def test_a_line_with_other_names_or_another_order_is_found() -> None:
    page = "```text\nstep 1/32 · kl 0.1 · len 19.5 · 3.8 s\n...\nModel: a/checkpoints/b\n```\n"
    run = "step 1/2 · kl -4.97e-06 · len 1,024 · 11.2 s\nstep 2/2\nModel: checkpoints/c\n"
    assert not_printed(page, run) == []
    assert not_printed(page, run.replace("kl", "ppo_kl")) == ["step 1/32 · kl 0.1 · len 19.5 · 3.8 s"]
    assert not_printed(page, "\n".join(reversed(run.splitlines()))) == ["Model: a/checkpoints/b"]


def assert_two_steps_and_a_checkpoint(folder: Path) -> None:
    [run] = (folder / "checkpoints").glob("**/smoke")
    steps = [record for record in records(run) if "critic/score/mean" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert (run / "global_step_2" / "actor").is_dir()


@pytest.mark.parametrize("script", [pytest.param(OTHERS[0], marks=pytest.mark.long), OTHERS[1]])
def test_a_script_trains_two_steps(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, as where Ray is not installed."""
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.setattr(smoke, "examine", lambda environment: smoke.Available(0, lambda package: False, environment))
    monkeypatch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)  # slow
    monkeypatch.chdir(tmp_path)
    _, _, *overrides = command_of(script, tmp_path)
    assert main_ppo.main(overrides) == 0
    assert_two_steps_and_a_checkpoint(tmp_path)


@pytest.mark.slow
def test_bash_runs_a_script_with_the_users_keys(tmp_path: Path) -> None:
    variables = {"RLOOM_SMOKE": "1", "PYTHON": sys.executable, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        ["bash", str(EXAMPLES / ONE_GPU), "trainer.device=cpu"],
        env={**os.environ, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [run] = (tmp_path / "checkpoints").glob("**/smoke")
    kept = run.parent.relative_to(tmp_path)
    assert f"trainer.default_local_dir: {kept} -> {kept}/smoke" in done.stdout
    for page in pages_of(ONE_GPU):
        assert not_printed(page.read_text(encoding="utf-8"), done.stdout) == [], page
    assert_two_steps_and_a_checkpoint(tmp_path)
