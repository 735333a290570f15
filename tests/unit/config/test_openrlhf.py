"""OpenRLHF's command line: each flag has its key or its reason, with OpenRLHF's defaults."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from rloom.cli import main as rloom
from rloom.cli import train_ppo_ray
from rloom.cli.openrlhf import set_variables
from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.frontends.openrlhf import translate
from rloom.config.frontends.openrlhf_flags import flags, refused, sections
from rloom.config.keys import all_keys, value_at
from rloom.config.load import load_config, with_changes
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.language import is_chinese_text, to_chinese
from rloom.launch.model_sources import policy_source

# SPEC section 1: classic name -> dotted name of 0.11 and default
SPEC: dict[str, tuple[str, Any]] = {
    "train_batch_size": ("train.batch_size", 128),
    "micro_train_batch_size": ("train.micro_batch_size", 4),
    "rollout_batch_size": ("rollout.batch_size", 1024),
    "micro_rollout_batch_size": ("rollout.micro_batch_size", 8),
    "n_samples_per_prompt": ("rollout.n_samples_per_prompt", 1),
    **{f"{role}_num_nodes": (f"{role}.num_nodes", 1) for role in ("actor", "ref", "critic", "reward")},
    **{f"{role}_num_gpus_per_node": (f"{role}.num_gpus_per_node", 8) for role in ("actor", "ref", "critic", "reward")},
    "colocate_actor_ref": ("train.colocate_actor_ref", False),
    "colocate_critic_reward": ("train.colocate_critic_reward", False),
    "colocate_all_models": ("train.colocate_all", False),
    "vllm_num_engines": ("vllm.num_engines", None),
    "vllm_tensor_parallel_size": ("vllm.tensor_parallel_size", 1),
    "vllm_gpu_memory_utilization": ("vllm.gpu_memory_utilization", 0.95),
    "advantage_estimator": ("algo.advantage.estimator", "gae"),
    "gamma": ("algo.advantage.gamma", 1.0),
    "lambd": ("algo.advantage.lambd", 1.0),
    "init_kl_coef": ("algo.kl.init_coef", 0.01),
    "kl_estimator": ("algo.kl.estimator", "k1"),
    "kl_target": ("algo.kl.target", None),
    "kl_horizon": ("algo.kl.horizon", 10000),
    "use_kl_loss": ("algo.kl.use_loss", False),
    "eps_clip": ("actor.eps_clip", 0.2),
    "eps_clip_low_high": ("actor.eps_clip_low_high", None),
    "value_clip": ("critic.value_clip", 0.5),
    "actor_learning_rate": ("actor.adam.lr", 1e-6),
    "critic_learning_rate": ("critic.adam.lr", 9e-6),
    "remote_rm_url": ("reward.remote_url", None),
    "agent_func_path": ("train.agent_func_path", None),
    "save_steps": ("ckpt.save_steps", -1),
    "eval_steps": ("eval.steps", -1),
    "ckpt_path": ("ckpt.path", "./ckpt/checkpoints_ppo_ray"),
    "save_path": ("ckpt.output_dir", None),
    "max_ckpt_num": ("ckpt.max_num", 3),
    "load_checkpoint": ("ckpt.load_enable", False),
    "num_episodes": ("train.num_episodes", 1),
    "max_epochs": ("train.max_epochs", 1),
    "pretrain": ("actor.model_name_or_path", None),
    "reward_pretrain": ("reward.model_name_or_path", None),
}
# the other flags of train_ppo_ray.py in releases 0.8.0, 0.9.10 and 0.11.0
RELEASES = """vllm_sync_backend vllm_sync_with_ray enable_prefix_caching enforce_eager vllm_enable_sleep async_train
    logging_steps save_hf_ckpt disable_ds_ckpt max_ckpt_mem use_ds_universal_ckpt local_rank zero_stage
    gradient_checkpointing deepcompile bf16 enable_ema ema_beta zpg adam_offload actor_init_on_gpu flash_attn
    use_liger_kernel grad_accum_dtype overlap_comm gradient_checkpointing_use_reentrant disable_fast_tokenizer
    deepspeed_enable_sleep ds_tensor_parallel_size packing_samples load_in_4bit lora_rank lora_alpha target_modules
    lora_dropout prompt_max_len generate_max_len max_len max_samples max_norm l2 ptx_coef normalize_reward top_p
    temperature seed full_determinism freezing_actor_steps save_value_network lr_warmup_ratio aux_loss_coef
    entropy_loss_coef adam_betas reward_clip_range no_advantage_std_norm ring_attn_size ring_head_stride critic_pretrain
    value_head_prefix ref_reward_offload agent_func_path prompt_data prompt_data_probs prompt_split eval_dataset
    eval_split eval_temperature eval_n_samples_per_prompt input_key label_key input_template apply_chat_template
    use_wandb wandb_org wandb_group wandb_project wandb_run_name use_tensorboard perf use_ms enable_vllm_is_correction
    vllm_is_truncated_threshold vllm_is_correction_type async_queue_size partial_rollout best_metric_key param_dtype
    attn_implementation dataloader_num_workers use_dynamic_batch rollout_max_tokens_per_gpu train_max_tokens_per_gpu
    vllm_generate_batch_size max_new_tokens dual_clip lr_scheduler policy_loss_type overlong_buffer_len
    overlong_penalty_factor stop_properly_penalty_coef dynamic_filtering dynamic_filtering_reward_range

    vllm.sync_backend vllm.sync_with_ray vllm.enable_prefix_caching vllm.enforce_eager vllm.enable_sleep
    algo.advantage.is_correction_enable algo.advantage.is_correction_threshold algo.advantage.is_correction_type
    train.async_enable train.async_queue_size train.partial_rollout_enable logger.logging_steps ckpt.save_hf
    ckpt.disable_ds ckpt.max_mem ckpt.best_metric_key ds.use_universal_ckpt ds.zero_stage
    actor.gradient_checkpointing_enable ds.deepcompile ds.param_dtype train.enable_ema train.ema_beta ds.zpg
    ds.adam_offload ds.attn_implementation ds.experts_implementation ds.use_liger_kernel ds.grad_accum_dtype
    ds.overlap_comm actor.gradient_checkpointing_reentrant data.disable_fast_tokenizer data.dataloader_num_workers
    ds.enable_sleep ds.tensor_parallel_size ds.packing_samples train.dynamic_batch_enable rollout.max_tokens_per_gpu
    train.max_tokens_per_gpu ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout
    rollout.vllm_generate_batch_size data.max_len rollout.max_new_tokens data.max_samples actor.dual_clip
    reward.normalize_enable rollout.top_p rollout.temperature train.seed train.full_determinism_enable
    critic.freezing_steps critic.save_value_network actor.policy_loss_type actor.aux_loss_coef actor.entropy_coef
    reward.clip_range actor.optim actor.muon.lr actor.muon.momentum actor.muon.ns_steps actor.muon.nesterov
    actor.muon.no_nesterov actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.lr_scheduler
    actor.lr_warmup_ratio actor.min_lr_ratio actor.max_norm critic.optim critic.muon.lr critic.muon.momentum
    critic.muon.ns_steps critic.muon.nesterov critic.muon.no_nesterov critic.adam.betas critic.adam.eps
    critic.adam.weight_decay critic.lr_scheduler critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm
    algo.advantage.no_std_norm reward.overlong_buffer_len reward.overlong_penalty_factor
    reward.stop_properly_penalty_coef ds.ring_attn_size ds.ring_attn_head_stride critic.model_name_or_path
    ds.value_head_prefix ref.offload reward.offload train.agent_func_path data.prompt_dataset data.prompt_probs
    data.prompt_split eval.dataset eval.split eval.temperature eval.n_samples_per_prompt data.input_key data.label_key
    data.input_template data.apply_chat_template logger.wandb.key logger.wandb.org logger.wandb.group
    logger.wandb.project logger.wandb.run_name algo.dynamic_filtering_enable algo.dynamic_filtering_range
    data.image_key data.max_images_per_prompt actor.freeze_visual_encoder logger.tensorboard_dir"""

SIZES = """--micro_train_batch_size 1 --train_batch_size 32 --micro_rollout_batch_size 2 --rollout_batch_size 32
    --n_samples_per_prompt 4"""  # document 000
PLACED = """--actor_num_gpus_per_node 8 --ref_num_gpus_per_node 8 --vllm_num_engines 2 --vllm_tensor_parallel_size 4
    --advantage_estimator rloo"""
MODEL = "--pretrain Qwen/Qwen2-7B-Instruct"


def config_of(text: str) -> Config:
    command = translate(shlex.split(text))
    config = load_config(command.overrides, command.values)
    check(config, declared_needs(config))
    return config


def faults_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        translate(shlex.split(text))
    return str(caught.value).splitlines()


def test_the_table_has_the_flags_of_the_specification_with_their_defaults() -> None:
    found = {name: (flags()[name].dotted, flags()[name].default) for name in SPEC}
    assert found == SPEC
    assert [flags()[name].default for name in ("prompt_max_len", "generate_max_len")] == [1024, 1024]


def test_every_flag_of_the_releases_has_a_key_or_a_reason() -> None:
    assert sorted(name for name in RELEASES.split() if name not in flags() and name not in refused()) == []
    assert flags().keys() & refused().keys() == set()


def test_every_flag_has_real_keys_and_a_meaning_in_two_languages() -> None:
    for section in sections():
        for flag in section.flags:
            assert set(flag.keys) <= all_keys().keys(), flag.name
            assert flag.meaning and is_chinese_text(to_chinese(flag.meaning)), flag.name
    assert all(" " in flag.reason for flag in refused().values())


DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 1024,
    "data.truncation": "left",
    "data.seed": 42,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.0,
    "actor_rollout_ref.actor.optim.betas": (0.9, 0.95),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.actor.optim.min_lr_ratio": 0.1,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.03,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 1e9,
    "actor_rollout_ref.actor.entropy_coeff": 0.0,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    "critic.optim.lr": 9e-6,
    "critic.optim.betas": (0.9, 0.95),
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "critic.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "k1",
    "algorithm.kl_ctrl.kl_coef": 0.01,
    "algorithm.kl_ctrl.type": "fixed",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.total_epochs": 1,
    "trainer.resume_mode": "disable",
    "trainer.default_local_dir": "./ckpt/checkpoints_ppo_ray",
    "trainer.max_actor_ckpt_to_keep": 3,
    "trainer.max_critic_ckpt_to_keep": 3,
}


def test_without_flags_the_keys_have_openrlhfs_defaults() -> None:
    config = config_of(MODEL)
    assert {key: value_at(config, key) for key in DEFAULTS} == DEFAULTS


def test_the_embedded_model_keeps_its_lengths_and_learning_rate() -> None:
    config = config_of(SIZES)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (64, 48)
    assert (config.actor_rollout_ref.actor.optim.lr, config.workers) == (2e-4, 1)


def test_dotted_names_set_the_same_keys() -> None:
    dotted = SIZES + " " + PLACED
    for name, (other, _) in SPEC.items():
        dotted = re.sub(rf"--{name}\b", f"--{other}", dotted)
    assert "--train.batch_size 32" in dotted and "--algo.advantage.estimator rloo" in dotted
    found, classic = translate(shlex.split(dotted)).values, translate(shlex.split(f"{SIZES} {PLACED}")).values
    assert classic == {**found, "algorithm.normalize_advantages": True}, "0.11 does not normalise those of rloo"


def test_document_000_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert rloom(["openrlhf", "--plan", *shlex.split(f"{SIZES} {PLACED}")]) == 0
    text = re.sub(" +", " ", capsys.readouterr().out)
    for figure in (
        "prompts × answers 32 × 4 = 128 samples",
        "rollout engines 8 / TP 4 = 2 engines: 16 prompts, 64 samples each",
        "old log-probs 128 samples / 8 ranks = 16 a rank, 2 a pass",
        "reference 128 samples / 8 ranks = 16 a rank, 2 a pass",
        "actor mini-batch 8 prompts × 4 = 32 samples; 4 a rank",
        "actor micro-batches 4 / 1 a pass = 4 accumulation steps a mini-batch",
        "actor optimizer steps 128 / 32 = 4 a PPO epoch × 1 epoch = 4 a step",
        "3 nodes × 8 GPUs = 24: Ray workers, actor on 8, reference on 8, rollout engines on 8",
        "actor, reference (KL is on), vllm rollout engine × 2",
        "--micro_rollout_batch_size sets the samples in a pass of: old log-probs, reference. Generation is batched",
    ):
        assert figure in text


def test_every_number_of_a_plan_is_of_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU; 3 does not divide 128; on-policy without KL nothing is scored."""
    assert rloom(["openrlhf", "--plan", *shlex.split(f"{SIZES} --micro_rollout_batch_size 3")]) == 0
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "rollout engines 1 / TP 1 = 1 engine: 32 prompts, 128 samples each" in text
    assert "old log-probs 128 samples / 1 rank = 128 a rank, 3 a pass" in text
    assert "1 node × 1 GPU = 1: one process" in text and "16 GPUs" not in text and "11 GPUs" not in text
    unscored = f"{SIZES} --advantage_estimator rloo --train_batch_size 128 --init_kl_coef 0"
    assert rloom(["openrlhf", "--plan", *shlex.split(unscored)]) == 0
    assert "--micro_rollout_batch_size has no effect in this run. Generation" in capsys.readouterr().out
    # a model of one's own on a machine without a GPU: 8 as OpenRLHF, so 32 / (1 × 8) = 4 accumulation steps
    assert rloom(["openrlhf", "--plan", *shlex.split(f"{SIZES} {MODEL} --advantage_estimator rloo")]) == 0
    text = re.sub(" +", " ", capsys.readouterr().out)
    assert "actor micro-batches 4 / 1 a pass = 4 accumulation steps a mini-batch" in text
    assert "8 GPUs are assumed: none is visible here" in text


def test_four_ppo_epochs_are_sixteen_updates(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_ppo_ray.main(["--plan", *shlex.split(f"{SIZES} {PLACED} --max_epochs 4 --save_steps 5")]) == 0
    assert "128 / 32 = 4 a PPO epoch × 4 epochs = 16 a step" in capsys.readouterr().out


ESTIMATORS = {  # estimator, normalize_advantages, norm_adv_by_std_in_grpo
    "gae": ("gae", None, True),
    "reinforce": ("reinforce_plus_plus", None, True),
    "rloo": ("rloo", True, True),
    "reinforce_baseline": ("reinforce_plus_plus_baseline", None, True),
    "group_norm": ("grpo", None, True),
    "dr_grpo": ("grpo", None, False),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_has_its_counterpart(name: str) -> None:
    chosen = config_of(f"--advantage_estimator {name} --n_samples_per_prompt 2").algorithm
    assert (chosen.adv_estimator, chosen.normalize_advantages, chosen.norm_adv_by_std_in_grpo) == ESTIMATORS[name]


def test_the_kl_is_in_the_reward_or_in_the_loss_or_nowhere() -> None:
    loss = config_of("--use_kl_loss --kl_estimator k3 --init_kl_coef 0.02")
    actor = loss.actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.02, "k3")
    assert not loss.kl_in_reward
    adaptive = config_of("--kl_target 6 --kl_horizon 500").algorithm.kl_ctrl
    assert (adaptive.type, adaptive.target_kl, adaptive.horizon, adaptive.kl_coef) == ("adaptive", 6, 500, 0.01)
    assert not config_of("--init_kl_coef 0").uses_reference


def test_one_schedule_of_the_classic_flags_counts_for_both_models_and_dotted_ones_for_one() -> None:
    both = config_of("--max_norm 2 --adam_betas 0.8 0.9 --lr_scheduler constant")
    assert (both.actor_rollout_ref.actor.grad_clip, both.critic.grad_clip) == (2, 2)
    assert both.critic.optim.betas == (0.8, 0.9) and both.critic.optim.lr_scheduler_type == "constant"
    one = config_of("--actor.max_norm 2 --critic.lr_scheduler linear")
    assert (one.actor_rollout_ref.actor.grad_clip, one.critic.grad_clip) == (2, 1)
    schedules = (one.actor_rollout_ref.actor.optim.lr_scheduler_type, one.critic.optim.lr_scheduler_type)
    assert schedules == ("cosine", "linear")


PLACEMENTS = {  # flags -> machines, GPUs of each, pools
    "--actor_num_gpus_per_node 2 --colocate_all_models --vllm_num_engines 2": (1, 2, {}),
    "--actor_num_gpus_per_node 2 --ref_num_gpus_per_node 2 --critic_num_gpus_per_node 2 --vllm_num_engines 2": (
        1,
        8,
        {"critic": 2, "ref": 2, "rollout": 2},
    ),
    "--colocate_actor_ref": (2, 8, {"critic": 8}),
    "--actor_num_nodes 2 --actor_num_gpus_per_node 4 --init_kl_coef 0 --critic_num_gpus_per_node 4": (
        3,
        4,
        {"critic": 4},
    ),
    f"{MODEL} --lora_rank 8 --actor_num_gpus_per_node 4 --critic_num_gpus_per_node 4": (1, 8, {"critic": 4}),
}


@pytest.mark.parametrize("text", PLACEMENTS)
def test_the_gpus_of_the_roles_become_machines_and_pools(text: str) -> None:
    trainer = config_of(text).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.pools.own) == PLACEMENTS[text]


def test_data_reward_and_checkpoints() -> None:
    config = config_of(
        "--prompt_data a.jsonl,b.parquet --eval_dataset c.json --input_key question --label_key answer --save_steps 5 "
        "--top_p 0.9 --remote_rm_url http://h:1/r,http://g:1/r --save_hf_ckpt --load_checkpoint --ckpt_path out "
        "--eval_steps 2"
    )
    data, rollout = config.data, config.actor_rollout_ref.rollout
    assert (data.train_files, data.val_files) == (["a.jsonl", "b.parquet"], "c.json")
    assert (data.prompt_key, data.label_key, data.default_data_source) == ("question", "answer", "default")
    validation = rollout.val_kwargs
    assert (validation.n, validation.temperature, validation.do_sample, validation.top_p) == (4, 0.6, True, 0.9)
    assert config.reward_model.remote.addresses == ("http://h:1/r", "http://g:1/r")
    trainer = config.trainer
    assert (trainer.save_freq, trainer.test_freq, trainer.resume_mode) == (5, 2, "auto")
    saved = config.actor_rollout_ref.actor.checkpoint.save_contents
    assert saved == ["model", "optimizer", "extra", "hf_model"]
    own = config_of("--remote_rm_url ./rewards.py").custom_reward_function
    assert (own.path, own.name) == ("./rewards.py", "reward_func")
    for name in ("agent_func_path", "train.agent_func_path"):
        assert config_of(f"--{name} ./agents.py").actor_rollout_ref.rollout.agent.path == "./agents.py:AgentExecutor"
    lengths = config_of(f"{MODEL} --max_len 2048 --max_new_tokens 1500").data
    assert (lengths.max_prompt_length, lengths.max_response_length) == (548, 1500)


def test_a_key_after_the_flags_overrides_them() -> None:
    config = config_of(f"{SIZES} --advantage_estimator rloo algorithm.normalize_advantages=False data.seed=7 --seed 3")
    assert (config.algorithm.normalize_advantages, config.data.seed) == (False, 7)


def test_the_printed_command_gives_the_same_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    template = "It's {} \\\n${x}\\"
    text = f"{SIZES} {PLACED} --prompt_data 'a b.jsonl' --input_template {shlex.quote(template)} --target_modules q k"
    arguments = [*shlex.split(text), "--lora_rank", "4", "--enable_prefix_caching", "data.seed=5"]
    arguments += ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    assert rloom(["openrlhf", "--print", *arguments]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed[:2] == ["rloom", "train"]
    command = translate(arguments)
    assert load_config(printed[2:]) == load_config(command.overrides, command.values)


def test_without_a_chat_template_the_prompt_is_used_as_it_is() -> None:
    from jinja2 import Template

    command = translate(["--prompt_data", "a.jsonl", "--input_template", "It's '{}'\n中文:"])
    template = Template(str(command.values["actor_rollout_ref.model.custom_chat_template"]))
    assert template.render(messages=[{"content": "2 + 3"}]) == "It's '2 + 3'\n中文:"
    config = load_config(command.overrides, command.values)
    assert policy_source(config).chat_template is None  # a saved model keeps its own
    own = with_changes(config, {"actor_rollout_ref.model.custom_chat_template": "{{ messages }}"})
    assert policy_source(own).chat_template == "{{ messages }}"
    with_template = translate(["--prompt_data", "a.jsonl", "--apply_chat_template"])
    assert "actor_rollout_ref.model.custom_chat_template" not in with_template.values


def test_all_faults_are_reported_together() -> None:
    assert faults_of("--enable_ema --rolout_batch_size 3 --seed x --train_batch_size 30 --n_samples_per_prompt 4") == [
        "--enable_ema: there is no moving average of the weights in this version; leave it out",
        "--rolout_batch_size: OpenRLHF has no such flag; did you mean --rollout_batch_size? "
        "(`rloom openrlhf --help` lists them)",
        "--seed x: it takes a whole number",
        "--train_batch_size 30 (samples) is not a multiple of --n_samples_per_prompt 4: the answers to a prompt stay "
        "in one update; use 28 or 32",
    ]


FAULTS = {
    "--train_batch_size 48 --rollout_batch_size 64": "does not divide --rollout_batch_size 64 × --n_samples",
    "--rollout_batch_size": "it takes one value, and 0 are given",
    "--advantage_estimator rloo": "compares the answers to one prompt; use 2 or more",
    "--advantage_estimator ppo": "it takes gae, reinforce, rloo, reinforce_baseline, group_norm, dr_grpo",
    "--prompt_data ./prompts": "rloom reads .parquet, .json, .jsonl files, and OWNER/NAME from the hub",
    "--prompt_data a.jsonl --prompt_split test": "--prompt_split test: a.jsonl has one split",
    "--enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis": "rollout_rs_threshold_lower=0.5",
    "--enable_vllm_is_correction --policy_loss_type gspo": "add --use_kl_loss, or use --init_kl_coef 0",
    "--n_samples_per_prompt 2 --advantage_estimator rloo --reward_clip_range -1 1": "use reward_model.score_range=[",
    "--n_samples_per_prompt 4 --advantage_estimator group_norm --reward_clip_range -1.4 9": "leave it out, or use",
    "--stop_properly_penalty_coef 2": "use a factor of 0 to 1, or a score below 0",
    "--actor.aux_loss_coef 0.1": "no term that balances the experts",
    "--colocate_all_models --vllm_num_engines 2": "= 2 GPUs, and the actor has",
    "--vllm_num_engines 1": "actor 8 + ref 8 + critic 8 + rollout 1 = 25 GPUs do not fill machines of 8",
    "--remote_rm_url http://h:1 --reward_pretrain m": "are two rewards; keep one",
    "--agent_func_path a.py --remote_rm_url http://h:1": "--agent_func_path and --remote_rm_url: the agent gives",
    "--agent_func_path a.py --reward_pretrain m": "--agent_func_path and --reward_pretrain: the agent gives",
    "--agent_func_path agents": "give a .py file with a class AgentExecutor",
    "--max_len 100 --max_new_tokens 100": "it leaves no tokens for the prompt beside --max_new_tokens 100",
    "--max_len 100 --generate_max_len 50": "keep one pair",
    "--train.partial_rollout_enable": "while a step trains; add --async_train",
    "--async_train": "add --vllm_num_engines N",
    "--async_train --async_queue_size 0 trainer.pools.rollout=1": "--async_queue_size 0: use 1 or more",
    "--disable_ds_ckpt": "add --save_hf_ckpt",
    "foo": "'foo' is neither a flag (--name) nor a key=value pair",
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_names_the_flag_and_the_way_out(text: str) -> None:
    found = faults_of(text)
    assert len(found) == 1 and FAULTS[text] in found[0]


@pytest.mark.parametrize(
    ("switch", "size"), [("async_train", "async_queue_size"), ("train.async_enable", "train.async_queue_size")]
)
def test_the_queue_of_async_training_is_counted_without_the_batch_of_the_next_step(switch: str, size: str) -> None:
    """OpenRLHF's queue of 3 has three batches beside the one that is trained, as rloom's with two ahead."""
    line = f"{SIZES} {PLACED} --{switch} --{size} 3"
    values = translate(shlex.split(line)).values
    found = {key: value for key, value in values.items() if key.startswith("trainer.v1.")}
    assert found == {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.num_warmup_batches": 2,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    }
    assert values["trainer.pools.rollout"] == 8
    partial = translate(shlex.split(f"{SIZES} {PLACED} --async_train --partial_rollout"))
    assert partial.values["trainer.v1.separate_async.num_warmup_batches"] == 0, "one step ahead, OpenRLHF's default"


def test_a_flag_that_asks_for_what_rloom_does_anyway_is_accepted() -> None:
    same, plain = (
        translate(shlex.split(text))
        for text in ("--flash_attn --attn_implementation flash_attention_2 --perf --grad_accum_dtype fp32", "")
    )
    assert same == plain


def test_flags_of_a_model_that_the_run_does_not_have_are_named() -> None:
    line = f"{SIZES} {PLACED} --use_kl_loss --critic_learning_rate 9e-6 --critic_num_gpus_per_node 4 --gamma 0.9"
    line = line.replace("--advantage_estimator", "--algo.advantage.estimator")
    assert translate(shlex.split(line)).notices == [
        "Note: --critic_learning_rate, --critic_num_gpus_per_node: no effect in this run, because "
        "--advantage_estimator rloo trains no critic",
        "Note: --gamma: no effect in this run, because --advantage_estimator rloo has no discount",
    ]
    config_of(line)
    assert config_of("--vllm_gpu_memory_utilization 0.7").actor_rollout_ref.rollout.gpu_memory_utilization == 0.7


def test_refused_flags_with_a_value_that_changes_nothing_are_accepted() -> None:
    assert translate(shlex.split("--vllm_sync_backend nccl --lora_dropout 0 --logging_steps 1 --zpg 1")).overrides == []


NOTICES = {  # flags -> the notices of what has no effect, or another one than in OpenRLHF
    "--kl_horizon 5": "--kl_horizon: no effect in this run, because --kl_target is not given",
    "--init_kl_coef 0 --kl_estimator k3": "because --init_kl_coef 0 turns the KL off",
    "--async_queue_size 2": "because --async_train is not given",
    "--use_dynamic_batch --micro_train_batch_size 1": "--micro_train_batch_size: no effect in this run, because",
    "--prompt_data a.jsonl --eval_steps 5 --best_metric_key x": "--eval_steps, --best_metric_key: no effect",
    "--normalize_reward": "because there is no reward model (--reward_pretrain)",
    "--lora_alpha 32": "because --lora_rank is 0",
    # of four answers one is at most 3 / sqrt(4) standard deviations from the mean
    "--n_samples_per_prompt 4 --advantage_estimator group_norm --use_kl_loss --reward_clip_range -1.5 1.5": (
        "--reward_clip_range: no effect in this run, because the scores of a group have a standard deviation of 1"
    ),
    "--ds.ring_attn_head_stride 2": "Note: --ds.ring_attn_head_stride 2: sequences are shared by Ulysses",
    "--attn_implementation eager": "the attention kernel is selected by model and device",
    "--ds.tensor_parallel_size 2": "needs no tensor parallelism",
    "--reward_pretrain m": "the critic starts from the policy's model. OpenRLHF starts it from the reward model",
    "--colocate_critic_reward --reward_pretrain m --critic_pretrain m": "the reward model shares the GPUs of the actor",
    f"{MODEL} --use_dynamic_batch --train_max_tokens_per_gpu 2000": "a pass may have 2048 tokens on each GPU",
    "--advantage_estimator dr_grpo --n_samples_per_prompt 2": "OpenRLHF subtracts it afterwards. --use_kl_loss is",
    "--advantage_estimator rloo --n_samples_per_prompt 2 --use_kl_loss": "since 0.9, which do not, use",
    f"{SIZES} {PLACED} --algo.advantage.estimator rloo --use_kl_loss --async_train": "OpenRLHF does so with",
}


@pytest.mark.parametrize("text", NOTICES)
def test_a_flag_without_effect_is_named_with_its_reason(text: str) -> None:
    [notice] = translate(shlex.split(text)).notices
    assert NOTICES[text] in notice and is_chinese_text(to_chinese(notice))
    config_of(text)


CORRECTION = "algorithm.rollout_correction"
RATIO_VALUES = {  # as the loss of OpenRLHF 0.11 multiplies by them
    "": {"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_is_threshold_lower": 0.5},
    "--vllm_is_truncated_threshold 0.9 1.1": {
        "rollout_is": "token", "rollout_is_threshold": 1.1, "rollout_is_threshold_lower": 0.9
    },
    "--vllm_is_correction_type icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "--policy_loss_type gspo --init_kl_coef 0": {"bypass_mode": True},
}  # fmt: skip


@pytest.mark.parametrize("text", RATIO_VALUES)
def test_the_correction_of_the_rollout_engines_log_probs_has_openrlhfs_bounds(text: str) -> None:
    line = f"--enable_vllm_is_correction {text}"
    found = {key: value for key, value in translate(shlex.split(line)).values.items() if key.startswith(CORRECTION)}
    assert found == {f"{CORRECTION}.{key}": value for key, value in RATIO_VALUES[text].items()}
    config_of(line)


LENGTHS = {  # flags -> longest prompt, answer, and both together
    "--max_len 2048": (2047, 2048, 2048),
    "--max_new_tokens 512": (1536, 512, None),
    "--max_len 100 --max_new_tokens 60": (40, 60, None),
    "--max_len 100 --max_new_tokens 60 --agent_func_path a.py": (40, 100, 100),
    "--prompt_max_len 10 --generate_max_len 20": (10, 20, None),
}


@pytest.mark.parametrize("text", LENGTHS)
def test_the_lengths_are_those_of_openrlhf(text: str) -> None:
    data = config_of(text).data
    assert (data.max_prompt_length, data.max_response_length, data.max_length) == LENGTHS[text]


def test_scores_and_groups_have_openrlhfs_limits() -> None:
    assert config_of("").reward_model.score_range == [-10, 10]
    assert config_of("--reward_clip_range -1 2").reward_model.score_range == [-1, 2]
    grouped = "--advantage_estimator group_norm --n_samples_per_prompt 2 --dynamic_filtering"
    assert config_of(grouped).reward_model.score_range is None
    assert config_of(grouped).algorithm.filter_groups.mean_score_range == [0, 1]
    other = config_of(f"{grouped} --dynamic_filtering_reward_range 0.2 0.8 --stop_properly_penalty_coef 0.5")
    assert other.algorithm.filter_groups.mean_score_range == [0.2, 0.8] and other.reward_model.truncated_score == 0.5
    assert config_of("--reward_pretrain m --normalize_reward").reward_model.model.normalize


def test_names_on_the_hub_are_files_of_their_split() -> None:
    data = config_of("--prompt_data a/b,c.jsonl --eval_dataset d/e.f --eval_split test --max_samples 9").data
    assert data.train_files == ["hf://datasets/a/b@~parquet/*/train/*", "c.jsonl"]
    assert data.val_files == "hf://datasets/d/e.f@~parquet/*/test/*"
    assert (data.train_max_samples, data.val_max_samples) == (9, 9)


def test_async_training_has_engines_of_its_own_beside_models_that_share_gpus() -> None:
    line = "--colocate_all_models --async_train --actor_num_gpus_per_node 4 --vllm_num_engines 2 --init_kl_coef 0"
    assert config_of(f"{line} --vllm_tensor_parallel_size 2").trainer.pools.own == {"rollout": 4}


def test_trackers_get_their_variables_and_a_key_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["--logger.wandb.key", "0123", "--wandb_org", "team", "--use_tensorboard", "a b"]
    command = translate(line)
    assert command.environment == {"TENSORBOARD_DIR": "a b", "WANDB_ENTITY": "team"}
    assert command.values["trainer.logger"] == ["console", "wandb", "tensorboard"]
    assert command.rloom_command.startswith("TENSORBOARD_DIR='a b' WANDB_ENTITY=team rloom train ")
    assert "0123" not in command.rloom_command and translate(["--use_wandb", "True"]).secret is None
    monkeypatch.setattr(sys, "argv", ["rloom", "openrlhf", *line])
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "TENSORBOARD_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_variables(command)
    assert (os.environ["WANDB_API_KEY"], os.environ["TENSORBOARD_DIR"]) == ("0123", "a b")
    assert sys.argv[3] == "True"


@pytest.mark.parametrize("page", ["coming_from_openrlhf.md", "coming_from_openrlhf.zh.md"])
def test_the_guide_has_every_flag(page: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in (*flags(), *refused()) if f"`--{name}`" not in text] == []


def test_help_lists_every_flag_in_the_language_of_the_locale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for language, word in {"C": "prompts per step", "zh_CN.UTF-8": "每步的 prompt 数"}.items():
        monkeypatch.setenv("LC_ALL", language)
        assert rloom(["openrlhf", "--help"]) == 0
        text = capsys.readouterr().out
        assert word in text and "--plan" in text
        assert [name for name in (*flags(), *refused()) if f"--{name}" not in text] == []
