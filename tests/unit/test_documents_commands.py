"""The documents' own commands, with nothing changed but the package's name: they pass every check, or say why not."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rloom.config.algorithm_needs import declared_needs
from rloom.config.checks import check
from rloom.config.dialects.kit import translate
from rloom.config.keys import value_at
from rloom.config.load import load_config
from rloom.config.uses import without_effect
from rloom.errors import ConfigError
from rloom.plan.batches import batches

GSM8K = "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet"
HALF_B = "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.model.path=Qwen/Qwen2.5-0.5B-Instruct"
SEVEN_B = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct critic.model.path=Qwen/Qwen2.5-7B-Instruct"
QWEN2 = "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct critic.model.path=Qwen/Qwen2-7B-Instruct"
REWARD_MODEL = "reward_model.enable=True reward_model.path=OpenAssistant/reward-model-deberta-v3-large"
RLOO = "algorithm.adv_estimator=rloo"

COMMANDS = {
    "001, quick start": f"""algorithm.adv_estimator=gae {GSM8K} data.train_batch_size=256 {HALF_B}
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5
        trainer.n_gpus_per_node=2 trainer.total_epochs=15""",
    "001, example 1": f"""algorithm.adv_estimator=gae {GSM8K} data.train_batch_size=256 {HALF_B}
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size=2
        critic.ppo_micro_batch_size=2 trainer.n_gpus_per_node=2 trainer.total_epochs=15 trainer.logger=console""",
    "001, reward model": f"""algorithm.adv_estimator=gae data.train_files=$HOME/data/hh_rlhf/train.parquet {SEVEN_B}
        {REWARD_MODEL} trainer.n_gpus_per_node=8""",
    "001, example 3": f"""algorithm.adv_estimator=gae data.train_files=$HOME/data/hh_rlhf/train.parquet
        data.val_files=$HOME/data/hh_rlhf/test.parquet {SEVEN_B} {REWARD_MODEL} algorithm.use_kl_in_reward=True
        algorithm.kl_ctrl.kl_coef=0.01 trainer.n_gpus_per_node=8""",
    "001, example 4": f"""algorithm.adv_estimator=gae data.train_files=$HOME/data/gsm8k/train.parquet {SEVEN_B}
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
        actor_rollout_ref.actor.kl_loss_type=kl algorithm.use_kl_in_reward=False trainer.n_gpus_per_node=8""",
    "003, example 1": f"""{RLOO} {GSM8K} data.train_batch_size=1024
        actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
        actor_rollout_ref.rollout.n=5 algorithm.kl_ctrl.kl_coef=0.001 trainer.total_epochs=15""",
    "003, example 2": f"""{RLOO} data.train_files=$HOME/data/math/train.parquet
        data.val_files=$HOME/data/math/test.parquet data.train_batch_size=512 data.max_response_length=2048
        actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=5e-7
        actor_rollout_ref.rollout.n=8 algorithm.kl_ctrl.kl_coef=0.002 trainer.total_epochs=20""",
    "003, example 3": f"""{RLOO} data.train_files=['$HOME/data/gsm8k/train.parquet','$HOME/data/math/train.parquet']
        data.train_batch_size=1024 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
        actor_rollout_ref.rollout.n=6 trainer.total_epochs=20""",
    "001, example 2": f"""algorithm.adv_estimator=gae {GSM8K} data.train_batch_size=512 {QWEN2}
        actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5 actor_rollout_ref.actor.ppo_mini_batch_size=128
        actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.total_epochs=20""",
    "001, example 5": """algorithm.adv_estimator=gae data.train_files=$HOME/data/gsm8k/train.parquet
        data.train_batch_size=1024 actor_rollout_ref.model.path=Qwen/Qwen2-72B-Instruct
        critic.model.path=Qwen/Qwen2-72B-Instruct actor_rollout_ref.rollout.tensor_model_parallel_size=4
        trainer.n_gpus_per_node=8 trainer.nnodes=4 trainer.node_rank=0 trainer.master_addr=192.168.1.100
        trainer.master_port=29500""",
    "001, advice on memory": """data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 critic.ppo_micro_batch_size_per_gpu=2
        actor_rollout_ref.actor.fsdp_config.gradient_checkpointing=True
        critic.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=True
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
        actor_rollout_ref.rollout.gpu_memory_utilization=0.3""",
    "001, advice on stability": """actor_rollout_ref.actor.optim.lr=5e-7 critic.optim.lr=5e-6
        actor_rollout_ref.actor.clip_ratio=0.1 actor_rollout_ref.actor.grad_clip=1.0 critic.grad_clip=1.0
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01
        actor_rollout_ref.actor.ppo_epochs=1 trainer.critic_warmup=10 algorithm.gamma=0.99 algorithm.lam=0.95
        trainer.logger=["console","tensorboard"]""",
}
SMALL_MEMORY = f"""{RLOO} data.train_batch_size=512 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.n_gpus_per_node=8"""  # 003, example 4
# Those that this version refuses: the command, and the reasons that it gives.
REFUSED = {
    "001, example 6": (
        "algorithm.adv_estimator=gae actor_rollout_ref.actor.strategy=megatron "
        "actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4 "
        "actor_rollout_ref.actor.megatron_config.pipeline_model_parallel_size=2 critic.strategy=megatron "
        "critic.megatron_config.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8",
        [
            "actor_rollout_ref.actor.strategy=megatron: the Megatron engine is not in this version",
            "actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4: the Megatron engine is not",
            "actor_rollout_ref.actor.megatron_config.pipeline_model_parallel_size=2: the Megatron engine is not",
            "critic.strategy=megatron: the Megatron engine is not in this version",
            "critic.megatron_config.tensor_model_parallel_size=4: the Megatron engine is not in this version",
        ],
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_the_documents_passes_every_check_and_every_key_of_it_has_an_effect(name: str) -> None:
    overrides = COMMANDS[name].split()
    config = load_config(overrides)
    needs = declared_needs(config)
    check(config, needs)
    assert without_effect(config, needs).notices == []
    for text in overrides:
        key, given = text.split("=", 1)
        read = value_at(config, key)
        if not given.startswith("["):
            assert str(read) == given or read == float(given)


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_of_the_documents_that_is_refused_says_what_is_missing(name: str) -> None:
    command, reasons = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        config = load_config(command.split())
        check(config, declared_needs(config))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(reasons)
    for line, reason in zip(sorted(lines), sorted(reasons), strict=True):
        assert reason in line


def test_the_rloo_commands_get_the_reference_that_document_003_says_they_need() -> None:
    for name in ("003, example 1", "003, example 2"):
        assert load_config(COMMANDS[name].split()).uses_reference
    assert not load_config(COMMANDS["003, example 3"].split()).uses_reference


def test_offloading_a_reference_that_is_not_there_is_a_notice() -> None:
    config = load_config(SMALL_MEMORY.split())
    needs = declared_needs(config)
    check(config, needs)
    [notice] = without_effect(config, needs).notices
    assert notice.startswith("actor_rollout_ref.ref.fsdp_config.param_offload=True: no effect in this run")


@pytest.mark.parametrize(
    ("command", "engines"),
    [
        (COMMANDS["001, example 2"], 4),  # 8 GPUs / 2
        (COMMANDS["001, example 5"], 8),  # 4 machines x 8 GPUs / 4
        (SMALL_MEMORY, 2),  # 8 GPUs / 4
    ],
)
def test_tensor_parallelism_without_a_name_is_that_of_vllm(command: str, engines: int) -> None:
    config = load_config(command.split())
    assert config.actor_rollout_ref.rollout.name == "vllm"
    assert batches(config, critic=False).engines == engines
    named = load_config([*command.split(), "actor_rollout_ref.rollout.name=native"])
    with pytest.raises(ConfigError, match=r"native engine holds a whole model in each worker; use 1, or .*name=vllm"):
        check(named, declared_needs(named))


JUDGE = "reward_model.api"
SYSTEM = "你是数学评分专家，请评估解答的正确性..."
SCORING = r"问题：{prompt}\n解答：{response}\n答案：{ground_truth}\n请评分1-10..."
MACHINES = "N_GPUS=8 NNODES=2 NODE_RANK={rank} MASTER_ADDR=192.168.1.1 ./train.sh"
# Every train.sh command of document 002 as it is printed there, and the keys that it sets.
KIT_COMMANDS: dict[str, dict[str, Any]] = {
    "./train.sh": {},
    "./train.sh --reward_model RLHFlow/ArmoRM-Llama3-8B-v0.1": {"reward_model.path": "RLHFlow/ArmoRM-Llama3-8B-v0.1"},
    "./train.sh --model Qwen/Qwen2.5-7B --epochs 20 --lr 5e-7": {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
        "trainer.total_epochs": 20,
        "actor_rollout_ref.actor.optim.lr": 5e-7,
    },
    "./train.sh --use_api_reward --rm_model qwen-plus": {f"{JUDGE}.enable": True, f"{JUDGE}.model": "qwen-plus"},
    **{
        f"./train.sh --use_api_reward --rm_api_type {kind} --rm_model {model}": {
            f"{JUDGE}.enable": True,
            f"{JUDGE}.type": kind,
            f"{JUDGE}.model": model,
        }
        for kind, model in {
            "openai": "gpt-4o-mini",
            "gemini": "gemini-1.5-flash",
            "claude": "claude-3-haiku-20240307",
        }.items()
    },
    **{
        f"./train.sh --use_api_reward --rm_prompt_preset {preset}": {f"{JUDGE}.enable": True, f"{JUDGE}.preset": preset}
        for preset in ("math", "code", "dialogue", "safety")
    },
    f"""./train.sh --use_api_reward \\
  --rm_system_prompt "{SYSTEM}" \\
  --rm_scoring_prompt "{SCORING}\"""": {
        f"{JUDGE}.enable": True,
        f"{JUDGE}.system_prompt": SYSTEM,
        f"{JUDGE}.scoring_prompt": SCORING,
    },
    """./train.sh \\
  actor_rollout_ref.model.lora_rank=8 \\
  actor_rollout_ref.model.lora_alpha=16""": {
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.model.lora_alpha": 16,
    },
    "./train.sh --batch_size 128": {
        "data.train_batch_size": 128,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    },
    "./train.sh --n_gpus 8": {"trainer.n_gpus_per_node": 8},
    **{
        MACHINES.format(rank=rank): {
            "trainer.n_gpus_per_node": 8,
            "trainer.nnodes": 2,
            "trainer.node_rank": rank,
            "trainer.master_addr": "192.168.1.1",
        }
        for rank in (0, 1)
    },
}
DOCUMENT_002 = Path(__file__).parents[2].parent / "shared" / "mission" / "002.md"


def kit_commands(document: str) -> set[str]:
    """The train.sh commands in the document's bash blocks, without comments and exports."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", document, re.S))
    lines = re.sub(r"\s+#.*|^#.*", "", blocks, flags=re.M)
    return set(re.findall(r"^(?:\w+=\S+ )*\./train\.sh(?:.*\\\n)*.*", lines, re.M))


def in_a_shell(command: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and variables that the shell gives to train.sh."""
    script = folder / "train.sh"
    script.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\" --\nenv -0\n")
    script.chmod(0o755)
    done = subprocess.run(["bash", "-c", command], cwd=folder, env={}, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")
    end = words.index("--")
    return words[:end], dict(word.split("=", 1) for word in words[end + 1 : -1])


@pytest.mark.parametrize("command", KIT_COMMANDS)
def test_a_command_of_document_002_sets_its_keys_and_passes_every_check(command: str, tmp_path: Path) -> None:
    translated = translate(*in_a_shell(command, tmp_path))
    config = load_config(translated.overrides, translated.values)
    assert {key: value_at(config, key) for key in KIT_COMMANDS[command]} == KIT_COMMANDS[command]
    own_model = {"algorithm.use_kl_in_reward"} if "--model" in command else set()  # the document's KL_COEF is 0.001
    assert config.given == {"trainer.default_local_dir", *own_model, *KIT_COMMANDS[command]}
    check(config, declared_needs(config))


@pytest.mark.skipif(not DOCUMENT_002.is_file(), reason="the document is not beside this clone")
def test_these_are_the_commands_of_the_document() -> None:
    assert kit_commands(DOCUMENT_002.read_text(encoding="utf-8")) == set(KIT_COMMANDS)
