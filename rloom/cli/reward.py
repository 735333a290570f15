"""`rloom reward try FILE --source S`"""

from collections.abc import Sequence

from rloom.cli.parsing import CommandParser
from rloom.config.load import load_config
from rloom.console import run_safely
from rloom.rewards import try_command


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("rloom reward", description="Rules and your own reward functions.")
    commands = parser.add_subparsers(dest="command", required=True)
    usage = "%(prog)s [FILE] [--source S] [--ground_truth T] [options] [reward_model.sandbox.KEY=VALUE ...]"
    try_command.add_arguments(commands.add_parser("try", usage=usage, help="score an answer by hand"))
    keys = [argument for argument in arguments if argument.startswith("reward_model.sandbox.")]
    given = parser.parse_args([argument for argument in arguments if argument not in keys])
    return run_safely(lambda: try_command.run(given, load_config(keys).reward_model.sandbox.model_dump()))
