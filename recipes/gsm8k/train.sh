#!/usr/bin/env bash
# GRPO or PPO on GSM8K with all weights of a small instruct model, on one GPU.
#   recipes/gsm8k/train.sh MODEL [grpo|ppo] [key=value ...]
# MODEL: a Hugging Face folder. DATA, OUT: where the prepared data and the run are kept.
# SOURCE: a folder with GSM8K's train.jsonl and test.jsonl; without it they are downloaded.
# INSTRUCTION: what follows each question, instead of the usual instruction; set DATA, too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../run.sh"
data=${DATA:-$HOME/data/gsm8k}
prepare gsm8k "$data" "${SOURCE:-}" ${INSTRUCTION+--instruction "$INSTRUCTION"}

# The last number of an answer counts (flexible), in training and in testing: what is gained is arithmetic, not `####`.
# 512 tokens suffice for long solutions. What is cut off is wrong, so a smaller limit would reward short answers.
train \
    custom_reward_function.reward_kwargs='{method: flexible}' \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    reward_model.num_workers=4 \
    trainer.total_training_steps=100 \
    "$@"

"$python" "$root/recipes/gsm8k/report.py" "$out/answers"
