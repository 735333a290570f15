#!/usr/bin/env bash
# Products with a calculator and the embedded model on a CPU: the policy learns to call the tool.
# In three steps: data, a supervised start on demonstrations that are mostly wrong, GRPO. No GPU, no download.
# OUT: where everything is written. SEED, SFT_STEPS and RL_STEPS can be set.
set -euo pipefail
out=${OUT:-checkpoints/calculator} seed=${SEED:-1} sft_steps=${SFT_STEPS:-160}
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"

"$PYTHON" -m rloom data prepare calculator --local_save_dir "$out/data"
"$PYTHON" -m rloom sft \
    data.train_files="$out/data/train.parquet" \
    model.path=embedded \
    optim.lr=2e-3 \
    optim.lr_scheduler_type=constant \
    trainer.total_training_steps="$sft_steps" \
    data.seed="$seed" \
    trainer.default_local_dir="$out/sft"
"$PYTHON" -m rloom export "$out/sft/global_step_$sft_steps" "$out/start"

exec "$PYTHON" -m rloom.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$out/data/train.parquet" \
    data.val_files="$out/data/test.parquet" \
    data.train_batch_size=32 \
    data.max_response_length=160 \
    actor_rollout_ref.model.path="$out/start" \
    actor_rollout_ref.actor.optim.lr=2e-4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.environment=calculator \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.multi_turn.max_environments=64 \
    trainer.total_training_steps="${RL_STEPS:-20}" \
    trainer.test_freq=5 \
    trainer.save_freq=-1 \
    data.seed="$seed" \
    trainer.default_local_dir="$out/grpo" \
    "$@"
