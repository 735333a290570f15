"""`python -m rloom.trainer.sft_trainer key=value ...`, the same as `rloom sft`."""

import os
import sys
from collections.abc import Sequence

# No import of torch here: configuration errors must not wait for it.
from rloom import __version__
from rloom.config.checks import check_sft
from rloom.config.load import load_sft_config
from rloom.config.schema import SftConfig
from rloom.console import run_with_keys
from rloom.launch.directory import claimed, in_directory
from rloom.launch.early_checks import announce_sft, check_early_sft, check_extras, check_gpus, check_sft_disk
from rloom.launch.inputs import read_sft_rows
from rloom.runtime.fork_server import fork_server

USAGE = """rloom sft [key=value ...] [--config-path DIR] [--config-name NAME]

Supervised fine-tuning: trains a model on given answers, the step before RL training. Rows are chats (`messages`), or
have a prompt and a response (data.prompt_key, data.response_key). Without keys: the embedded model on the embedded
data.

  rloom sft model.path=Qwen/Qwen2.5-0.5B data.train_files=train.parquet data.val_files=test.parquet optim.lr=1e-5

`rloom config --sft` lists the keys with their meaning and defaults, `rloom config --sft KEY` explains one. Your
own YAML file (NAME.yaml in DIR) can also set keys; it starts with `defaults: [sft_trainer, _self_]`. The same command
again resumes a run that stopped. RLOOM_SMOKE=1 replaces model and data by small embedded ones, for two steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    return run_with_keys(USAGE, arguments, lambda overrides, source: train(load_sft_config(overrides, **source)))


def train(config: SftConfig) -> int:
    check_sft(config)
    if config.trainer.node_rank > 0:
        check_extras(config)
        check_gpus(config)
        from rloom.launch.ray_cluster import join

        return join(config)
    check_early_sft(config)
    if config.uses_torchrun and config.workers > 1:
        use_own_gpu()
        if os.environ["RANK"] != "0":
            announce_sft(in_directory(config), __version__)
            from rloom.launch.sft import serve

            return serve(config)
    data = read_sft_rows(config)
    check_sft_disk(config, len(data.train))
    with claimed(config, data.content) as own:
        announce_sft(own, __version__)
        if own.uses_processes:
            fork_server(begins_run=True)
        from rloom.launch.sft import run

        run(own, data)
    return 0


def use_own_gpu() -> None:
    """Each rank of torchrun uses one GPU, and sees no other. Before torch is imported."""
    rank, visible = int(os.environ["LOCAL_RANK"]), os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(rank)] if visible is None else visible.split(",")[rank : rank + 1]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)


if __name__ == "__main__":
    sys.exit(main())
