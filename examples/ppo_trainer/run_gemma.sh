#!/usr/bin/env bash
# PPO: Gemma 2B on GSM8K, with a critic of the same size. The KL to the model at the start is measured, without a penalty;
# without it (algorithm.kl_metric=False) a step has a forward pass less.
# GPUs: 2 x 24 GB
# Parameters and optimizer states that are not in use are in host memory: 64 GB of it. On GPUs of 80 GB this is faster:
#   actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
#   critic.model.fsdp_config.param_offload=False critic.model.fsdp_config.optimizer_offload=False
# Your own keys come last and override these: run_gemma.sh trainer.total_epochs=20 actor_rollout_ref.actor.optim.lr=5e-7
set -euo pipefail
data=${DATA:-$HOME/data/gsm8k}  # python examples/data_preprocess/gsm8k.py --local_save_dir $HOME/data/gsm8k
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
experiment=$(experiment gemma2b function_rm "$@")

exec "$PYTHON" -m rloom.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path=google/gemma-2b-it \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    critic.model.path=google/gemma-2b-it \
    critic.model.enable_gradient_checkpointing=True \
    critic.model.fsdp_config.param_offload=True \
    critic.model.fsdp_config.optimizer_offload=True \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    algorithm.use_kl_in_reward=False \
    algorithm.kl_metric=True \
    trainer.critic_warmup=0 \
    trainer.logger='["console","tensorboard"]' \
    trainer.experiment_name="$experiment" \
    trainer.default_local_dir="checkpoints/$experiment" \
    trainer.number_runs=True \
    trainer.n_gpus_per_node=2 \
    trainer.nnodes=1 \
    trainer.save_freq=20 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.max_critic_ckpt_to_keep=2 \
    trainer.test_freq=10 \
    trainer.total_epochs=15 \
    "$@"
