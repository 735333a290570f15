#!/usr/bin/env bash
# PPO: Qwen2 7B on GSM8K. Micro-batches are filled up to a number of tokens instead of samples.
# GPUs: 8 x 80 GB
# `rloom plan` with the same keys prints the memory of each. With one GPU: ../grpo_trainer/run_qwen2-7b_lora.sh
set -euo pipefail
data=${DATA:-$HOME/data/gsm8k}  # python examples/data_preprocess/gsm8k.py --local_save_dir $HOME/data/gsm8k
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
experiment=$(experiment qwen2_7b seq_balance "$@")

exec "$PYTHON" -m rloom.trainer.main_ppo \
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
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    critic.model.path=Qwen/Qwen2-7B-Instruct \
    critic.model.enable_gradient_checkpointing=True \
    critic.model.fsdp_config.param_offload=True \
    critic.model.fsdp_config.optimizer_offload=True \
    critic.optim.lr=1e-5 \
    critic.use_dynamic_bsz=True \
    critic.ppo_max_token_len_per_gpu=48000 \
    algorithm.use_kl_in_reward=False \
    algorithm.kl_metric=True \
    trainer.balance_batch=True \
    trainer.critic_warmup=0 \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=rloom_ppo \
    trainer.experiment_name="$experiment" \
    trainer.number_runs=True \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.max_critic_ckpt_to_keep=2 \
    trainer.test_freq=5 \
    trainer.total_epochs=20 \
    "$@"
