"""`rloom kit [flags] [key=value ...]`: `rloom train` with the flags, variables and files of train.sh."""

import os
from collections.abc import Sequence

from rloom.config.dialects.kit import translate
from rloom.config.load import load_config
from rloom.config.smoke import is_on
from rloom.console import run_safely
from rloom.trainer import main_ppo


def main(arguments: Sequence[str]) -> int:
    def run() -> int:
        command = translate(arguments, os.environ)
        config = load_config(command.overrides, command.values)
        if not is_on(os.environ):  # a smoke run prints what it replaces
            print(command.reward, flush=True)
        return main_ppo.train(config)

    return run_safely(run)
