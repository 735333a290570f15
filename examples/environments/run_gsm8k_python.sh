#!/usr/bin/env bash
# GRPO: Qwen2.5 1.5B on GSM8K with a Python tool in the sandbox. TOOL=none: without it.
# GPUs: 1 x 141 GB; with less memory, reduce actor_rollout_ref.actor.ppo_max_token_len_per_gpu
set -euo pipefail
data=${DATA:-$HOME/data/gsm8k}  # rloom data prepare gsm8k
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
experiment=$(experiment qwen2.5-1.5b gsm8k_python "$@")

tool=(
    actor_rollout_ref.rollout.multi_turn.environment=python
    # small models write programs, but rarely calls in JSON
    actor_rollout_ref.rollout.multi_turn.format=code_block
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=512
    actor_rollout_ref.rollout.multi_turn.max_environments=256
)
if [[ ${TOOL:-python} == none ]]; then
    tool=()  # one answer to each prompt
fi

exec "$PYTHON" -m rloom.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    custom_reward_function.reward_kwargs='{method: flexible}' \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=768 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr=4e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    actor_rollout_ref.rollout.max_num_batched_tokens=16384 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.project_name=rloom_environments \
    trainer.experiment_name="$experiment" \
    trainer.number_runs=True \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=10 \
    trainer.total_training_steps=40 \
    "${tool[@]}" \
    "$@"
