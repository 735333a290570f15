"""The example scripts run as they are: their keys exist, fit together, and give way to the user's."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.plan_scaling import QWEN_7B
from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.effects import without_effect
from rloom.config.load import load_config
from rloom.plan.make import make_plan

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
QWEN_05B = {  # of config.json
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = {
    "ppo_trainer/run_gemma.sh": "gae",
    "ppo_trainer/run_qwen2-7b_seq_balance.sh": "gae",
    "ppo_trainer/run_qwen2-7b_rm.sh": "gae",
    "ppo_trainer/run_qwen2-7b_math_megatron.sh": "gae",
    "rloo_trainer/run_qwen2-7b.sh": "rloo",
    "grpo_trainer/run_qwen2-7b.sh": "grpo",
    "grpo_trainer/run_qwen2-7b_lora.sh": "grpo",
    "grpo_trainer/run_qwen2.5-0.5b.sh": "grpo",
}
GPUS = {  # what each names: (GPUs, GB of one)
    "ppo_trainer/run_gemma.sh": (2, 24),
    "ppo_trainer/run_qwen2-7b_seq_balance.sh": (8, 80),
    "ppo_trainer/run_qwen2-7b_rm.sh": (8, 80),
    "ppo_trainer/run_qwen2-7b_math_megatron.sh": (8, 80),
    "rloo_trainer/run_qwen2-7b.sh": (8, 80),
    "grpo_trainer/run_qwen2-7b.sh": (8, 80),
    "grpo_trainer/run_qwen2-7b_lora.sh": (1, 80),
    "grpo_trainer/run_qwen2.5-0.5b.sh": (1, 24),
}


def command_of(script: str, folder: Path, *own: str, has_packages: bool = True) -> list[str]:
    """What the script would have run, as Python sees it. `has_packages`: the answer if it looks for a package."""
    stub = folder / "python"
    answer = "" if has_packages else '[ "$1" = -c ] && exit 1\n'
    stub.write_text(f'#!/bin/sh\n{answer}printf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *own],
        env={**os.environ, "PYTHON": str(stub), "HOME": "/somewhere"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
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
    sources = ["gsm8k", "math"] if "math" in script else ["hh_rlhf" if "_rm" in script else "gsm8k"]
    files = [f"/somewhere/data/{source}/train.parquet" for source in sources]
    assert config.data.train_files == (files if len(files) > 1 else files[0])
    needs = declared_needs(config)
    check(config, needs)
    assert without_effect(config, needs).notices == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_fits_the_gpus_that_it_names(script: str, tmp_path: Path) -> None:
    header = re.search(r"^# GPUs: (\d+) x (\d+) GB$", (EXAMPLES / script).read_text(encoding="utf-8"), re.M)
    assert header is not None and tuple(map(int, header.groups())) == GPUS[script]
    gpus, memory = GPUS[script]
    model = GEMMA_2B if "gemma" in script else QWEN_05B if "0.5b" in script else QWEN_7B
    (tmp_path / "config.json").write_text(json.dumps(model))
    paths = [f"actor_rollout_ref.model.path='{tmp_path}'"]
    paths += [f"critic.model.path='{tmp_path}'"] if SCRIPTS[script] == "gae" else []
    paths += [f"reward_model.path='{tmp_path}'"] if "_rm" in script else []  # as large as that of the script
    _, _, *overrides = command_of(script, tmp_path, *paths)
    plan = make_plan(load_config(overrides), gpu_gib=memory * 1e9 / 2**30)  # vendors count 10^9 bytes
    assert plan.batches.ranks == gpus
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


@pytest.mark.parametrize(
    ("has_packages", "engine", "gpus", "tracker"), [(True, "vllm", 2, "wandb"), (False, "native", 1, "tensorboard")]
)
def test_the_rloo_script_has_the_keys_of_document_003_where_their_packages_are_installed(
    tmp_path: Path, has_packages: bool, engine: str, gpus: int, tracker: str
) -> None:
    _, _, *overrides = command_of("rloo_trainer/run_qwen2-7b.sh", tmp_path, has_packages=has_packages)
    config = load_config(overrides)
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == (engine, gpus, 0.6)
    assert (trainer.loggers, trainer.save_freq, trainer.test_freq) == (["console", tracker], -1, 5)
    check(config, declared_needs(config))


def test_the_ppo_scripts_measure_the_kl_that_document_001_shows(tmp_path: Path) -> None:
    for script in (name for name, estimator in SCRIPTS.items() if estimator == "gae"):
        _, _, *overrides = command_of(script, tmp_path)
        assert load_config(overrides).uses_reference, script


def test_another_model_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """Document 001: run_gemma.sh, then the same script with Qwen in the same directory."""
    qwen = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct"
    both = [command_of("ppo_trainer/run_gemma.sh", tmp_path, *own) for own in ([], [qwen])]
    first, second = (load_config(overrides).trainer.default_local_dir for _, _, *overrides in both)
    assert first == "checkpoints/gemma2b_function_rm"
    assert second == "checkpoints/Qwen2.5-0.5B-Instruct_function_rm"


def test_scripts_run_from_their_own_folder(tmp_path: Path) -> None:
    absolute = command_of("rloo_trainer/run_qwen2-7b.sh", tmp_path)
    done = subprocess.run(
        ["bash", "run_qwen2-7b.sh"],
        env={**os.environ, "PYTHON": str(tmp_path / "python"), "HOME": "/somewhere"},
        cwd=EXAMPLES / "rloo_trainer",
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.splitlines() == absolute


@pytest.mark.parametrize(
    ("script", "targets"),
    [("ppo_trainer/run_qwen2-7b_math_megatron.sh", ["megatron"]), ("grpo_trainer/run_qwen2-7b.sh", [])],
)
def test_a_clone_with_its_environment_brings_the_extra_of_a_script(
    script: str, targets: list[str], tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(EXAMPLES, clone / "examples")
    programs = {"make": f'echo "$@" >> {tmp_path}/made', "clone/.venv/bin/python": 'echo "$2"'}
    for program, text in programs.items():
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "RLOOM_SMOKE")}
    environment = kept | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(**more: str) -> str:
        command = ["bash", str(clone / "examples" / script)]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, check=True).stdout

    assert run(RLOOM_SMOKE="1") == "rloom.trainer.main_ppo\n"  # needs no network
    assert not (tmp_path / "made").exists()
    assert run() == "rloom.trainer.main_ppo\n"
    made = (tmp_path / "made").read_text().split() if (tmp_path / "made").exists() else []
    assert made[-1:] == targets
