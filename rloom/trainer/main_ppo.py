"""`python -m rloom.trainer.main_ppo key=value ...`, the same as `rloom train`."""

import sys
from collections.abc import Sequence

from rloom import __version__

# No import of torch here: configuration errors must not wait for it.
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.console import run_with_keys
from rloom.launch.directory import claimed, in_directory
from rloom.launch.early_checks import announce_run, check, check_extras, check_gpus, check_keys
from rloom.runtime.fork_server import fork_server

USAGE = """rloom train [key=value ...] [--config-path DIR] [--config-name NAME]

Trains a policy. Without keys: the embedded model on the embedded data, no download. `python -m rloom.trainer.main_ppo`
is the same command. The same command again resumes a run that stopped.

  rloom train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
      data.train_files=train.parquet data.val_files=test.parquet actor_rollout_ref.rollout.n=8

The keys that most runs set:
  algorithm.adv_estimator                         gae (PPO), rloo, grpo, ...
  actor_rollout_ref.model.path                    folder or hub name of the model
  data.train_files, data.val_files                parquet, json or jsonl; one file or a list
  data.train_batch_size                           prompts per step
  data.max_response_length                        tokens of an answer at most
  actor_rollout_ref.rollout.n                     answers to each prompt
  actor_rollout_ref.actor.optim.lr                learning rate of the policy
  actor_rollout_ref.actor.ppo_mini_batch_size     prompts per optimizer step
  trainer.n_gpus_per_node                         GPUs of a machine; default: all visible
  trainer.total_epochs                            passes over the training prompts

`rloom config` lists all keys with meaning and default, `rloom config KEY` explains one, `rloom plan` with the same keys
shows batches, memory and time. Your own YAML file (NAME.yaml in DIR) can also set keys; it starts with
`defaults: [ppo_trainer, _self_]`.

Exit codes: 0 done · 2 an error that you can correct · 3 a worker or machine was lost, run the same command again ·
130 interrupted, after saving the last step."""


def main(arguments: Sequence[str] | None = None) -> int:
    return run_with_keys(USAGE, arguments, lambda overrides, source: train(load_config(overrides, **source)))


def train(config: Config) -> int:
    if config.trainer.node_rank > 0:
        check_keys(config)
        check_extras(config)
        check_gpus(config)
        announce_run(in_directory(config), __version__)
        from rloom.launch.ray_cluster import join

        return join(config)
    checked, data = check(config)
    with claimed(checked, data.content) as own:
        announce_run(own, __version__)
        if own.uses_processes:
            fork_server(begins_run=True)
        from rloom.launch.run import Caller, run

        run(own, Caller(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
