"""The documents' own commands, with nothing changed but the package's name: they pass every check, or say why not."""

import pytest

from rloom.config.algorithm_needs import declared_needs
from rloom.config.checks import check
from rloom.config.keys import value_at
from rloom.config.load import load_config
from rloom.config.uses import without_effect
from rloom.errors import ConfigError

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
WHOLE_MODEL = "holds a whole model in each worker; tensor parallelism is not in this version of rloom; use 1"
# Those that this version refuses: the command, and the reasons that it gives.
REFUSED = {
    "001, example 2": (
        f"algorithm.adv_estimator=gae {GSM8K} data.train_batch_size=512 {QWEN2} actor_rollout_ref.actor.optim.lr=1e-6 "
        "critic.optim.lr=1e-5 actor_rollout_ref.actor.ppo_mini_batch_size=128 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 trainer.total_epochs=20",
        [WHOLE_MODEL],
    ),
    "001, example 5": (
        "algorithm.adv_estimator=gae data.train_files=$HOME/data/gsm8k/train.parquet data.train_batch_size=1024 "
        "actor_rollout_ref.model.path=Qwen/Qwen2-72B-Instruct critic.model.path=Qwen/Qwen2-72B-Instruct "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4 trainer.n_gpus_per_node=8 trainer.nnodes=4 "
        "trainer.node_rank=0 trainer.master_addr=192.168.1.100 trainer.master_port=29500",
        [WHOLE_MODEL],
    ),
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
    "003, example 4": (
        f"{RLOO} data.train_batch_size=512 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=4 "
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.actor.fsdp_config.param_offload=True "
        "actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.n_gpus_per_node=8",
        [WHOLE_MODEL],
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
    command = [word for word in REFUSED["003, example 4"][0].split() if "tensor_model_parallel" not in word]
    config = load_config(command)
    needs = declared_needs(config)
    check(config, needs)
    [notice] = without_effect(config, needs).notices
    assert notice.startswith("actor_rollout_ref.ref.fsdp_config.param_offload=True: no effect in this run")
