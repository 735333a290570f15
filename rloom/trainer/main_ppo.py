"""`python -m rloom.trainer.main_ppo key=value ...`, the same as `rloom train`."""

import sys
from collections.abc import Sequence

# Nothing heavy up here: reading the configuration and finding a misspelt key must not wait for torch.
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.console import run_safely, split_hydra_flags


def main(arguments: Sequence[str] | None = None) -> int:
    def run() -> int:
        overrides, source = split_hydra_flags(sys.argv[1:] if arguments is None else arguments)
        return train(load_config(overrides, **source))

    return run_safely(run)


def train(config: Config) -> int:
    from rloom.trainer.run import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
