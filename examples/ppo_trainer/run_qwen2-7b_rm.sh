#!/usr/bin/env bash
# PPO: Qwen2 7B with a reward model (a sequence classifier) instead of rules. The prompts are those of GSM8K; DATA names
# the folder of others, of which only the column with the prompt is read.
# 8 GPUs of 80 GB, which need Ray: pip install --editable '.[ray]' in the clone. Each GPU holds a whole copy of the reward
# model while it scores, on the host otherwise. trainer.pools.reward=2 gives it two GPUs of its own instead.
set -euo pipefail
data=${DATA:-$HOME/data/gsm8k}  # python examples/data_preprocess/gsm8k.py --local_save_dir $HOME/data/gsm8k
reward_model=${REWARD_MODEL_PATH:-sfairXC/FsfairX-LLaMA3-RM-v0.1}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PATH=$root/.venv/bin:$PATH  # the environment that `make setup` made, where there is one

exec "${PYTHON:-python3}" -m rloom.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000 \
    critic.model.path=Qwen/Qwen2-7B-Instruct \
    critic.model.enable_gradient_checkpointing=True \
    critic.model.fsdp_config.param_offload=True \
    critic.model.fsdp_config.optimizer_offload=True \
    critic.optim.lr=1e-5 \
    critic.use_dynamic_bsz=True \
    critic.ppo_max_token_len_per_gpu=48000 \
    reward_model.enable=True \
    reward_model.path="$reward_model" \
    reward_model.model.use_remove_padding=True \
    reward_model.model.fsdp_config.param_offload=True \
    reward_model.use_dynamic_bsz=True \
    reward_model.forward_max_token_len_per_gpu=32768 \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.01 \
    trainer.balance_batch=True \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=rloom_ppo \
    trainer.experiment_name=qwen2_7b_rm \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
