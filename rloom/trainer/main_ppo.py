"""`python -m rloom.trainer.main_ppo key=value ...`, the same as `rloom train`."""

import sys
from collections.abc import Sequence

# Nothing heavy up here: reading the configuration and finding a misspelt key must not wait for torch.
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.console import run_safely, split_hydra_flags

USAGE = """rloom train [key=value ...] [--config-path DIR] [--config-name NAME]

Trains a policy. Without keys: the embedded model on the embedded data. `rloom config` lists the keys with what they
mean and their defaults, `rloom config KEY` explains one. A YAML file of yours (NAME.yaml in DIR) can hold them too; it
starts with `defaults: [ppo_trainer, _self_]`. The same command again goes on from where a run stopped."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "-h" in given or "--help" in given:
        print(USAGE)
        return 0

    def run() -> int:
        overrides, source = split_hydra_flags(given)
        return train(load_config(overrides, **source))

    return run_safely(run)


def train(config: Config) -> int:
    from rloom.trainer.run import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
