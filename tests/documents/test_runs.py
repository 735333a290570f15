"""Every training command of the documents, run for two steps with RLOOM_SMOKE=1 and otherwise as it is printed.

The shell gives the arguments (`tests/documents/shell.py`); the commands run in this process, and their workers as
forked processes (`tests/local_ray.py`), since Python and Ray take longer to start than two steps.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray looks when it is imported
pytest.importorskip("ray")

from rloom.cli import kit
from rloom.rewards.judge.addresses import ADDRESS_VARIABLES
from rloom.trainer import main_ppo
from tests.documents.printed import copied
from tests.documents.shell import Command, start
from tests.documents.test_commands import COMMANDS
from tests.e2e.runs import records
from tests.judge_server import Body, serving
from tests.local_ray import use_local_ray
from tests.shown_output import not_printed, pages_of

pytestmark = pytest.mark.slow
STEPS = 2
START = ("Initializing Ray ...", "Creating worker pool for actor", "Starting training ...")


@pytest.fixture(scope="module")
def judge() -> Iterator[dict[str, str]]:
    """A server with the protocols of the four providers, and the variables that name it and the key of document 002."""

    def say(body: Body, user: str) -> str:
        return json.dumps({"reason": "by its length", "score": 1 + len(user) % 10})

    keys = {entry.text.removeprefix("export ").split("=")[0] for entry in copied() if "_API_KEY=" in entry.text}
    assert keys == {"DASHSCOPE_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "ANTHROPIC_API_KEY"}
    with serving(say=say, key="your_api_key") as server:
        addresses = {names[0]: server.base_url(provider) for provider, names in ADDRESS_VARIABLES.items()}
        yield {**addresses, **dict.fromkeys(keys, "your_api_key")}


# With the tiny model and data they run what another command of the documents runs: the same script or example with
# another model, batch, learning rate, number of the machine or text for the judge. test_commands.py checks their keys.
GSM8K = "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet"
GAE = "001 python3 -m rloom.trainer.main_ppo algorithm.adv_estimator=gae"
REPEATED = (
    "002 N_GPUS=8 NNODES=2",
    "002 ./train.sh --batch_size 128",
    "002 ./train.sh --model Qwen/Qwen2.5-7B",
    *(f"002 ./train.sh --use_api_reward --rm_prompt_preset {name}" for name in ("math", "dialogue", "safety")),
    "004 bash run_gemma.sh",
    "001 bash examples/ppo_trainer/run_gemma.sh trainer",
    "001 bash examples/ppo_trainer/run_gemma.sh actor",
    f"{GAE} {GSM8K} data.train_batch_size=512",
    f"{GAE} data.train_files=$HOME/data/hh_rlhf/train.parquet actor_rollout_ref",  # run_qwen2-7b_rm.sh has its keys
    "003 python3 -m rloom.trainer.main_ppo algorithm.adv_estimator=rloo data.train_files=$HOME/data/math/train.parquet",
)


def test_every_command_that_is_left_out_is_one() -> None:
    assert [name for name in REPEATED if not any(command.name.startswith(name) for command in COMMANDS)] == []


def marked(command: Command) -> Any:
    return pytest.param(command, marks=pytest.mark.long) if command.name.startswith(REPEATED) else command


@pytest.mark.parametrize("command", [marked(command) for command in COMMANDS], ids=lambda command: command.name)
def test_two_steps_of_a_command(
    command: Command,
    judge: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = start(command, tmp_path)
    if "--use_api_reward" in command.text:
        for variable, value in judge.items():
            monkeypatch.setenv(variable, value)
    for name in ("HOME", "N_GPUS", "NNODES", "NODE_RANK", "MASTER_ADDR"):
        if name in started.variables:
            monkeypatch.setenv(name, started.variables[name])
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rloom.trainer.run.draw_learning_curve", lambda metrics_file, picture: picture)
    use_local_ray(monkeypatch)
    main = kit.main if command.is_kit else main_ppo.main
    status = main(started.arguments)
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    if "worker 1: process" in printed.err:  # as document 001 shows the start of a run
        places = [printed.err.index(line) for line in START]
        assert places == sorted(places)
    for page in pages_of(command.name):
        assert not_printed(page.read_text(encoding="utf-8"), printed.err + printed.out) == [], page
    if "--use_api_reward" in command.text:
        assert "reward_model.api.enable" not in printed.out  # not replaced
    [metrics] = tmp_path.rglob("metrics.jsonl")
    if "critic.strategy=megatron" in started.arguments:  # two workers divide each layer of both models
        log = (metrics.parent / "logs" / "worker_0.log").read_text()
        assert re.findall(r"(\w+): [\d,]+ parameters, (\w+ \([\w ,]+\))", log) == [
            ("actor", "Megatron (tensor 2)"),
            ("critic", "Megatron (tensor 2)"),
        ]
    steps = [record for record in records(metrics.parent) if "critic/score/mean" in record]
    assert [record["step"] for record in steps] == [1, STEPS]
    assert all(record["reward/failed"] == 0 for record in steps)
    assert [float(record["actor/grad_norm"]) > 0 for record in steps] == [True, True]
