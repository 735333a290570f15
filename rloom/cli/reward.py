"""`rloom reward try FILE --source S`"""

import argparse
from collections.abc import Sequence

from rloom.config.load import load_config
from rloom.console import run_safely, split_hydra_flags
from rloom.rewards import try_command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom reward", description="Rules and your own reward functions.")
    commands = parser.add_subparsers(dest="command", required=True)
    try_command.add_arguments(
        commands.add_parser(
            "try",
            usage="%(prog)s [FILE] [--source S] [--ground_truth T] [options] [reward_model.sandbox.KEY=VALUE ...]",
            help="score an answer by hand",
        )
    )
    given, rest = parser.parse_known_args(arguments)

    def run() -> int:
        overrides, source = split_hydra_flags(rest)
        return try_command.run(given, load_config(overrides, **source).reward_model.sandbox.model_dump())

    return run_safely(run)
