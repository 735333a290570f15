"""Commands of the documents whose output pages show, run for two steps with RLOOM_SMOKE=1.

`test_in_order.py` runs all commands under their printed names. The shell gives the arguments (`shell.py`); the commands
run in this process, and their workers as forked processes, since Python and Ray take longer to start than two steps.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray looks when it is imported
pytest.importorskip("ray")

from rloom.cli import kit
from rloom.trainer import main_ppo
from tests.documents.shell import Command, start
from tests.documents.test_commands import COMMANDS
from tests.e2e.runs import records
from tests.shown_output import not_printed, pages_of

pytestmark = pytest.mark.slow
STEPS = 2
POOLS = tuple(f"Creating {role} worker pool" for role in ("Actor", "Critic", "Rollout"))
START = (*POOLS, "Starting training ...")


@pytest.mark.long  # test_in_order.py trains one command of each kind
@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if pages_of(command.name)], ids=lambda command: command.name
)
def test_two_steps_of_a_command(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = start(command, tmp_path)
    monkeypatch.setenv("HOME", started.variables["HOME"])
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)
    main = kit.main if command.is_kit else main_ppo.main
    status = main(started.arguments)
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    if "worker 1: process" in printed.err:  # as document 001 shows the start of a run
        has_critic = "algorithm.adv_estimator=rloo" not in started.arguments
        places = [printed.err.index(line) for line in START if has_critic or "Critic" not in line]
        assert places == sorted(places)
    for page in pages_of(command.name):
        assert not_printed(page.read_text(encoding="utf-8"), printed.err + printed.out) == [], page
    [metrics] = tmp_path.rglob("metrics.jsonl")
    steps = [record for record in records(metrics.parent) if "critic/score/mean" in record]
    assert [record["step"] for record in steps] == [1, STEPS]
    assert all(record["reward/failed"] == 0 for record in steps)
    assert [float(record["actor/grad_norm"]) > 0 for record in steps] == [True, True]
