#!/usr/bin/env bash
# RLOO: Qwen2 7B on GSM8K, five answers to a prompt, each compared with the other four; KL to the reference in the reward.
# GPUs: 8 x 80 GB
# The engine is vLLM with two GPUs for each copy if vLLM is installed (extra `vllm`), else rloom's own; the tracker is
# Weights & Biases if it is installed (extra `wandb`), else TensorBoard. Only the last step is saved; more of them:
#   trainer.save_freq=20 trainer.max_actor_ckpt_to_keep=2
# On one GPU of 80 GB, train an adapter:
#   trainer.n_gpus_per_node=1 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
#   actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.actor.optim.lr=1e-5
set -euo pipefail
data=${DATA:-$HOME/data/gsm8k}  # python examples/data_preprocess/gsm8k.py --local_save_dir $HOME/data/gsm8k
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
experiment=$(experiment qwen2_7b function_rm "$@")
engine=native gpus_per_engine=1 tracker=tensorboard
if installed vllm; then engine=vllm gpus_per_engine=2; fi
if installed wandb; then tracker=wandb; fi

exec "$PYTHON" -m rloom.trainer.main_ppo \
    algorithm.adv_estimator=rloo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.name=$engine \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$gpus_per_engine \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.critic_warmup=0 \
    trainer.logger="['console','$tracker']" \
    trainer.project_name=rloom_rloo_example_gsm8k \
    trainer.experiment_name="$experiment" \
    trainer.number_runs=True \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 \
    "$@"
