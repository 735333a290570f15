#!/usr/bin/env bash
# PPO: Qwen2 7B on GSM8K and MATH, with Megatron's tensor and pipeline parallelism.
# GPUs: 8 x 80 GB
# The eight GPUs hold one copy of actor and critic: each layer on four, half of the layers on each four (docs/megatron.md).
set -euo pipefail
gsm8k=${GSM8K:-$HOME/data/gsm8k}  # python examples/data_preprocess/gsm8k.py --local_save_dir $HOME/data/gsm8k
math=${MATH:-$HOME/data/math}  # python examples/data_preprocess/math.py --local_dir $HOME/data/math
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
experiment=$(experiment qwen2_7b math_megatron "$@")

exec "$PYTHON" -m rloom.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="['$gsm8k/train.parquet', '$math/train.parquet']" \
    data.val_files="['$gsm8k/test.parquet', '$math/test.parquet']" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron_config.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.ref.megatron.param_offload=True \
    critic.strategy=megatron \
    critic.megatron_config.tensor_model_parallel_size=4 \
    critic.megatron_config.pipeline_model_parallel_size=2 \
    critic.model.path=Qwen/Qwen2-7B-Instruct \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    algorithm.use_kl_in_reward=False \
    algorithm.kl_metric=True \
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
    trainer.total_epochs=15 \
    "$@"
