# Sourced by the recipes' train.sh, with $@ = MODEL [grpo|ppo] [key=value ...]: the functions `prepare` and `train`, and
# the settings that the recipes share, for one GPU of 140 GB; recipes/gsm8k/README.md has their reasons.
usage="usage: ${BASH_SOURCE[1]} MODEL [grpo|ppo] [key=value ...]"
model=${1:?$usage}
shift
algorithm=grpo
case ${1:-} in grpo | ppo) algorithm=$1 && shift ;; esac
recipe=$(basename "$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-checkpoints/$recipe/$(basename "$model")-$algorithm}
PATH=$root/.venv/bin:$PATH  # the environment that `make setup` made, where there is one
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}

# prepare NAME FOLDER SOURCE [OPTION ...]: train.parquet and test.parquet, unless they exist. An empty SOURCE: download.
prepare() {
    if [[ ! -f $2/train.parquet || ! -f $2/test.parquet ]]; then
        "$python" -m rloom data prepare "$1" --local_save_dir "$2" ${3:+--source "$3"} "${@:4}"
    fi
}

keys=(
    actor_rollout_ref.model.path="$model"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=4e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.optim.lr_scheduler_type=linear
    actor_rollout_ref.actor.optim.weight_decay=0.0
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.checkpoint.save_contents='[model]'
    actor_rollout_ref.rollout.name=native
    actor_rollout_ref.rollout.enforce_eager=False
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.max_num_seqs=1024
    actor_rollout_ref.rollout.max_num_batched_tokens=16384
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.val_kwargs.do_sample=False
    trainer.val_before_train=True
    trainer.test_freq=20
    trainer.save_freq=-1
    trainer.project_name="$recipe"
    trainer.experiment_name="$(basename "$model")-$algorithm"
    trainer.default_local_dir="$out"
    trainer.validation_data_dir="$out/answers"
)

# 512 answers a step and one update of the policy with all of them.
grpo_keys=(
    algorithm.adv_estimator=grpo
    data.train_batch_size=64
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.actor.skip_zero_advantages=True  # groups with equal scores have no gradient
)
# Four answers to each of 128 prompts, which a pass computes once, and four updates of the critic in a step.
ppo_keys=(
    algorithm.adv_estimator=gae
    algorithm.gamma=1.0
    algorithm.lam=1.0
    data.train_batch_size=128
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.rollout.n=4
    critic.model.path="$model"
    critic.model.enable_gradient_checkpointing=False
    critic.optim.lr=1e-5
    critic.optim.lr_warmup_steps=5
    critic.ppo_mini_batch_size=32
    critic.ppo_max_token_len_per_gpu=16384
    trainer.critic_warmup=3
)

# train KEY=VALUE ...: of the recipe, then the user's. `seconds.txt` in the run directory: what the command took.
train() {
    local -n own=${algorithm}_keys
    "$python" -m rloom.trainer.main_ppo "${keys[@]}" "${own[@]}" "$@"
    [[ ${RLOOM_SMOKE:-} != 1 ]] || exit 0  # its run directory is another one, and it keeps no answers
    mkdir -p "$out"  # the run may have another directory
    echo "$SECONDS" > "$out/seconds.txt"
}
