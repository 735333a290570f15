"""The recipes' scripts: their keys exist, fit together, have an effect, fit the GPU, and give way to the user's."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.effects import without_effect
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.plan.make import make_plan

RECIPES = Path(__file__).parents[3] / "recipes"
SCRIPTS = sorted(str(file.relative_to(RECIPES)) for file in RECIPES.glob("*/train.sh"))
STUB = """#!/bin/sh
[ "$2" = rloom.trainer.main_ppo ] && mkdir -p "$OUT" && shift 2 && printf '%s\\n' "$@" > "$OUT/keys"
[ "$2" = rloom ] && shift 2 && printf "%s\\n" "$*" >> "$OUT.prepared"
exit 0
"""
QWEN_15B = {  # of config.json
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def run(script: str, folder: Path, *own: str, **variables: str) -> None:
    (folder / "python").write_text(STUB)
    (folder / "python").chmod(0o755)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(QWEN_15B))
    paths = {"PYTHON": str(folder / "python"), "DATA": str(folder / "data"), "OUT": str(folder / "out")}
    subprocess.run(
        [str(RECIPES / script), str(folder / "model"), *own], check=True, env={**os.environ, **paths, **variables}
    )


def config_of(script: str, folder: Path, *own: str) -> Config:
    run(script, folder, *own)
    return load_config((folder / "out" / "keys").read_text().splitlines())


def test_there_is_a_script_for_each_task() -> None:
    assert SCRIPTS == ["code/train.sh", "gsm8k/train.sh", "math/train.sh"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("algorithm", [[], ["grpo"], ["ppo"]], ids=["none", "grpo", "ppo"])
def test_a_recipe_passes_every_check_and_fits_one_gpu(script: str, algorithm: list[str], tmp_path: Path) -> None:
    own = [*algorithm, "trainer.n_gpus_per_node=1"]
    config = config_of(script, tmp_path, *own)
    assert config.algorithm.adv_estimator == ("gae" if algorithm == ["ppo"] else "grpo")
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 512
    needs = declared_needs(config)
    check(config, needs)
    # names are for results.py, which reads config.yaml
    assert [note for note in without_effect(config, needs).notices if "_name=" not in note] == []
    plan = make_plan(config, gpu_gib=139)
    assert plan.batches.ranks == 1
    assert plan.costs is not None and plan.costs.memory.fits


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_smoke_run_of_a_recipe_ends_after_the_training(script: str, tmp_path: Path) -> None:
    run(script, tmp_path, RLOOM_SMOKE="1")
    assert (tmp_path / "out" / "keys").is_file()
    assert not (tmp_path / "out" / "seconds.txt").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_keys_given_to_a_recipe_win(script: str, tmp_path: Path) -> None:
    own = ["data.seed=3", "trainer.total_training_steps=7", "actor_rollout_ref.actor.optim.lr=2e-6"]
    config = config_of(script, tmp_path, *own)
    optim = config.actor_rollout_ref.actor.optim
    assert (config.data.seed, config.trainer.total_training_steps, optim.lr) == (3, 7, 2e-6)
    assert (tmp_path / "out" / "seconds.txt").read_text().strip().isdigit()


def test_the_code_recipe_prepares_both_sets_from_their_folders(tmp_path: Path) -> None:
    run("code/train.sh", tmp_path, SOURCE="/raw")
    assert (tmp_path / "out.prepared").read_text().splitlines() == [
        f"data prepare {name} --local_save_dir {tmp_path}/data/{name} --source /raw/{name}"
        for name in ("mbpp", "humaneval")
    ]


def test_the_instruction_of_gsm8k_reaches_the_data(tmp_path: Path) -> None:
    run("gsm8k/train.sh", tmp_path, SOURCE="/raw", INSTRUCTION=r"In \boxed{}.")
    prepared = f"data prepare gsm8k --local_save_dir {tmp_path}/data --source /raw --instruction In \\boxed{{}}.\n"
    assert (tmp_path / "out.prepared").read_text() == prepared
