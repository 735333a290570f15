"""`rloom reward try FILE --source S`"""

import argparse
from collections.abc import Sequence

from rloom.console import run_safely
from rloom.rewards import try_command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom reward", description="Rules and your own reward functions.")
    commands = parser.add_subparsers(dest="command", required=True)
    try_command.add_arguments(commands.add_parser("try", help="score an answer by hand"))
    given = parser.parse_args(arguments)
    return run_safely(lambda: try_command.run(given))
