"""`python -m rloom.trainer.main_ppo key=value ...`, the same as `rloom train`."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from rloom.config.algorithm_needs import brings_own_algorithm, declared_needs

# No import of torch here: configuration errors must not wait for it.
from rloom.config.checks import verify
from rloom.config.load import load_config
from rloom.config.run_config import RunConfig
from rloom.config.schema import Config
from rloom.console import run_safely, split_hydra_flags
from rloom.errors import ConfigError
from rloom.extras import install_command
from rloom.runtime.nodes import no_ray

USAGE = """rloom train [key=value ...] [--config-path DIR] [--config-name NAME]

Trains a policy. Without keys: the embedded model on the embedded data. `rloom config` lists the keys with their meaning
and defaults, `rloom config KEY` explains one. Your own YAML file (NAME.yaml in DIR) can also set keys; it starts with
`defaults: [ppo_trainer, _self_]`. The same command again resumes a run that stopped."""


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
    check(config)
    if config.trainer.node_rank > 0:
        from rloom.trainer.join import join

        return join(config)
    from rloom.trainer.run import run

    run(config)
    return 0


def check(config: Config) -> None:
    """What can be checked before torch is imported."""
    if not brings_own_algorithm(config):  # the user's file imports torch; `run` checks it
        verify(config, declared_needs(config))
    check_extras(config)


def check_extras(config: RunConfig) -> None:
    """Check that the optional libraries of this run are installed."""
    if config.uses_ray and find_spec("ray") is None:
        raise ConfigError(no_ray("trainer.nnodes, trainer.n_gpus_per_node"))
    if "wandb" in config.trainer.loggers and find_spec("wandb") is None:
        way = f"remove it from trainer.logger, or install it: {install_command('wandb')}"
        raise ConfigError(f"trainer.logger='wandb' is not installed; {way}")


if __name__ == "__main__":
    sys.exit(main())
