#!/usr/bin/env bash
# One command: sets itself up, then trains. No argument: the embedded model on the embedded data, no download.
#   ./train.sh --model Qwen/Qwen2.5-0.5B-Instruct --lr 5e-7 data.train_files=train.parquet
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case " $* " in *" --use_api_reward "*) setup=judge ;; *) setup=runtime ;; esac  # the providers' libraries are an extra
make --directory "$root" --no-print-directory --silent "$setup"
RLOOM_KIT_DIR="$root" exec "$root/.venv/bin/rloom" kit "$@"
