#!/usr/bin/env bash
# One command: sets itself up, then trains. No argument: the embedded model on the embedded data, no download.
#   ./train.sh --model Qwen/Qwen2.5-0.5B-Instruct --data train.parquet --lr 5e-7
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# Libraries that only some runs need are extras: megatron-core, Ray for several machines, trackers.
setup=(runtime)
given=" trainer.nnodes=${NNODES:-1} ${RAY_ADDRESS:+RAY_ADDRESS} $* "
[[ "${RLOOM_SMOKE:-0}" == 1 ]] && given=""  # a smoke run replaces what needs them
[[ "$given" =~ (trainer\.(nnodes=([2-9]|[1-9][0-9])|backend=ray)|ray_kwargs\.ray_init)|\ RAY_ADDRESS ]] && setup+=(ray)
[[ "$given" =~ strategy=megatron ]] && setup+=(megatron)
for tracker in wandb swanlab mlflow trackio; do
  [[ "$given" =~ \ trainer\.logger=[^\ ]*$tracker ]] && setup+=("$tracker")
done
make --directory "$root" --no-print-directory --silent "${setup[@]}"
# the files that users edit: a missing one is written; where the folder is read-only, the run goes on without it
for file in api_reward_config.yaml reward_model_config.yaml common/reward_functions.py; do
  from="$root/rloom/assets/kit/$file"
  [[ -e "$root/$file" || ! -e "$from" ]] || (mkdir -p "$root/$(dirname "$file")" && cp "$from" "$root/$file") 2> /dev/null || true
done
RLOOM_KIT_DIR="$root" exec "$root/.venv/bin/rloom" kit "$@"
