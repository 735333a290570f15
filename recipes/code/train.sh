#!/usr/bin/env bash
# GRPO or PPO on MBPP's 374 training problems, tested on its 500 test problems and on HumanEval, on one GPU.
#   recipes/code/train.sh MODEL [grpo|ppo] [key=value ...]
# MODEL: a Hugging Face folder. DATA, OUT: where the prepared data and the run are kept.
# SOURCE: a folder with mbpp/mbpp.jsonl and humaneval/HumanEval.jsonl.gz; without it they are downloaded.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../run.sh"
data=${DATA:-$HOME/data}
for name in mbpp humaneval; do
    prepare $name "$data/$name" "${SOURCE:+$SOURCE/$name}"
done

# The programs of the answers run in sandboxes. Two test problems of MBPP have long lists of numbers in their prompts.
train \
    data.train_files="$data/mbpp/train.parquet" \
    data.val_files="[$data/mbpp/test.parquet,$data/humaneval/test.parquet]" \
    data.max_prompt_length=4096 \
    data.max_response_length=768 \
    reward_model.num_workers=12 \
    trainer.total_training_steps=40 \
    "$@"
