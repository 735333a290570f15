"""What train.sh installs before a run: a stand-in for make writes down its targets."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT


def targets(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """The targets that train.sh makes. The last word printed is the stand-in of rloom's own."""
    shutil.copy(ROOT / "train.sh", folder)
    for program, text in {"make": 'echo "$@"', ".venv/bin/rloom": 'echo "started $1"'}.items():
        (folder / program).parent.mkdir(parents=True, exist_ok=True)
        (folder / program).write_text(f"#!/bin/sh\n{text}\n")
        (folder / program).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("N_GPUS", "NNODES", "MODEL_PATH")}
    kept["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [folder / "train.sh", *arguments],
        env=kept | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    made, started = done.stdout.splitlines()
    assert started == "started kit"
    return made.split("--silent ")[1].split()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--n_gpus", "1"],
        ["trainer.n_gpus_per_node=1", "trainer.nnodes=1"],
        ["trainer.logger=[console]"],
        ["--model", "Qwen/Qwen2-7B"],
        ["--batch_size", "128", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.n=8"],
        ["--n_gpus", "8"],
        ["trainer.n_gpus_per_node=2"],
    ],
)
def test_a_run_on_one_machine_needs_no_extra(tmp_path: Path, arguments: list[str]) -> None:
    assert targets(tmp_path, *arguments) == ["runtime"]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["+trainer.nnodes=2"], {}),
        (["--n_gpus", "8", "trainer.nnodes=16"], {}),
        (["--n_gpus", "8", "trainer.backend=ray"], {}),
        ([], {"NNODES": "2", "N_GPUS": "8"}),
        (["+ray_kwargs.ray_init.address=10.0.0.1:6379"], {}),
        ([], {"RAY_ADDRESS": "10.0.0.1:6379"}),
    ],
)
def test_several_machines_bring_ray(tmp_path: Path, arguments: list[str], variables: dict[str, str]) -> None:
    assert targets(tmp_path, *arguments, **variables) == ["runtime", "ray"]


def test_megatron_brings_its_library(tmp_path: Path) -> None:
    given = ["--n_gpus", "8", "actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron"]
    assert targets(tmp_path, *given) == ["runtime", "megatron"]
    assert targets(tmp_path, *given, RLOOM_SMOKE="1") == ["runtime"]


def test_trackers_bring_their_libraries_and_a_judge_needs_none(tmp_path: Path) -> None:
    given = ["--use_api_reward", "--n_gpus", "8", "trainer.logger=[console,wandb]"]
    assert targets(tmp_path, *given) == ["runtime", "wandb"]
    assert targets(tmp_path, "reward_model.api.enable=True") == ["runtime"]
    assert targets(tmp_path, "trainer.logger=[mlflow,trackio,swanlab]") == ["runtime", "swanlab", "mlflow", "trackio"]
