"""The example scripts run as they are: their keys exist, fit together, and give way to the user's."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rloom.config.algorithm_needs import declared_needs
from rloom.config.checks import check
from rloom.config.load import load_config
from rloom.config.uses import without_effect
from rloom.plan.make import make_plan
from rloom.plan.scaling import QWEN_7B

GEMMA_2B = {  # of config.json
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 256000,
    "tie_word_embeddings": True,
}
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {
    "ppo_trainer/run_gemma.sh": "gae",
    "ppo_trainer/run_qwen2-7b_seq_balance.sh": "gae",
    "ppo_trainer/run_qwen2-7b_rm.sh": "gae",
    "rloo_trainer/run_qwen2-7b.sh": "rloo",
    "grpo_trainer/run_qwen2-7b.sh": "grpo",
}


def command_of(script: str, folder: Path, *own: str) -> list[str]:
    """What the script would have run, as Python sees it."""
    stub = folder / "python"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *own],
        env={**os.environ, "PYTHON": str(stub), "HOME": "/somewhere"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return done.stdout.splitlines()


def test_every_script_is_listed() -> None:
    assert {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.glob("*_trainer/*.sh")} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_scripts_keys_compose_and_pass_every_check(script: str, tmp_path: Path) -> None:
    flag, module, *overrides = command_of(script, tmp_path)
    assert (flag, module) == ("-m", "rloom.trainer.main_ppo")
    config = load_config(overrides)
    assert config.algorithm.adv_estimator == SCRIPTS[script]
    assert config.data.train_files == "/somewhere/data/gsm8k/train.parquet"
    needs = declared_needs(config)
    check(config, needs)
    assert without_effect(config, needs).notices == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_fits_the_gpus_that_it_names(script: str, tmp_path: Path) -> None:
    model = {**(GEMMA_2B if "gemma" in script else QWEN_7B)}
    (tmp_path / "config.json").write_text(json.dumps(model))
    paths = [f"actor_rollout_ref.model.path='{tmp_path}'"]
    paths += [f"critic.model.path='{tmp_path}'"] if SCRIPTS[script] == "gae" else []
    paths += [f"reward_model.path='{tmp_path}'"] if "_rm" in script else []  # as large as that of the script
    _, _, *overrides = command_of(script, tmp_path, *paths)
    plan = make_plan(load_config(overrides), gpu_gib=80)
    assert plan.batches.ranks == (2 if "gemma" in script else 8)  # as the documents have it
    assert plan.costs is not None and plan.costs.memory.fits
    assert (plan.costs.reward is not None) == ("_rm" in script)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_key_given_to_a_script_wins(script: str, tmp_path: Path) -> None:
    _, _, *overrides = command_of(script, tmp_path, "trainer.total_epochs=7", "trainer.project_name='two words'")
    config = load_config(overrides)
    assert (config.trainer.total_epochs, config.trainer.project_name) == (7, "two words")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_can_be_executed(script: str) -> None:
    assert os.access(EXAMPLES / script, os.X_OK)
