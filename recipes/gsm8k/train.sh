#!/usr/bin/env bash
# GRPO on GSM8K with all weights of a small instruct model, on one GPU of 80 GB or more.
#   recipes/gsm8k/train.sh MODEL [key=value ...]
# MODEL: a Hugging Face folder. DATA, OUT: where the prepared data and the run are kept.
# SOURCE: a folder with GSM8K's train.jsonl and test.jsonl; without it they are downloaded.
set -euo pipefail
model=${1:?usage: recipes/gsm8k/train.sh MODEL [key=value ...]}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
data=${DATA:-$HOME/data/gsm8k}
out=${OUT:-checkpoints/gsm8k/$(basename "$model")}
PATH=$root/.venv/bin:$PATH  # the environment that `make setup` made, where there is one
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}

if [[ ! -f $data/train.parquet || ! -f $data/test.parquet ]]; then
    "$python" -m rloom data prepare gsm8k --local_save_dir "$data" ${SOURCE:+--source "$SOURCE"}
fi

# The last number of an answer counts (flexible), in training and in testing: what is gained is arithmetic, not `####`.
# 64 prompts × 8 answers and one update a step: exactly on-policy, so nothing is scored twice and nothing is clipped.
# 512 tokens are room for long-winded solutions: what is cut off counts as wrong, and brevity is not what to teach.
"$python" -m rloom.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=True \
    custom_reward_function.reward_kwargs='{method: flexible}' \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.optim.lr=4e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.optim.weight_decay=0.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.checkpoint.save_contents='[model]' \
    actor_rollout_ref.rollout.name=native \
    actor_rollout_ref.rollout.enforce_eager=False \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    actor_rollout_ref.rollout.max_num_batched_tokens=16384 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=False \
    reward_model.num_workers=4 \
    trainer.total_training_steps=100 \
    trainer.val_before_train=True \
    trainer.test_freq=20 \
    trainer.save_freq=100 \
    trainer.project_name=gsm8k \
    trainer.experiment_name="$(basename "$model")" \
    trainer.default_local_dir="$out" \
    trainer.validation_data_dir="$out/answers" \
    "$@"

"$python" "$root/recipes/gsm8k/report.py" "$out/answers"
