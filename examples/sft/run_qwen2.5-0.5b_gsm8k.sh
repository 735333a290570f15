#!/usr/bin/env bash
# Supervised fine-tuning of Qwen2.5 0.5B on the solutions of GSM8K, the step before RL training. All visible GPUs, or
# trainer.n_gpus_per_node=1.
# RLOOM_SMOKE=1 runs two steps on the embedded model and data.
set -euo pipefail
data=${DATA:-$HOME/data/gsm8k}  # python examples/data_preprocess/gsm8k.py --local_save_dir $HOME/data/gsm8k
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PATH=$root/.venv/bin:$PATH  # the environment that `make setup` made, where there is one

exec "${PYTHON:-python3}" -m rloom.trainer.sft_trainer \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.prompt_key=prompt \
    data.response_key=extra_info \
    data.response_dict_keys="['answer']" \
    data.train_batch_size=256 \
    data.max_length=1024 \
    data.truncation=right \
    model.path="${MODEL:-Qwen/Qwen2.5-0.5B}" \
    optim.lr=1e-5 \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=qwen2.5-0.5b \
    trainer.number_runs=True \
    trainer.total_epochs=2 \
    trainer.test_freq=20 \
    "$@"
