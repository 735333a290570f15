#!/usr/bin/env bash
# GRPO or PPO on the training problems of MATH, tested on MATH-500, on one GPU.
#   recipes/math/train.sh MODEL [grpo|ppo] [key=value ...]
# MODEL: a Hugging Face folder. DATA, OUT: where the prepared data and the run are kept.
# SOURCE: a folder with train.json and test500.jsonl; without it they are downloaded.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../run.sh"
data=${DATA:-$HOME/data/math}
prepare math "$data" "${SOURCE:-}"

# A few training problems are longer than 1,024 tokens, because they contain the program of a drawing; none of MATH-500.
train \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.max_prompt_length=1024 \
    data.filter_overlong_prompts=True \
    data.max_response_length=1024 \
    reward_model.num_workers=8 \
    trainer.total_training_steps=60 \
    "$@"
