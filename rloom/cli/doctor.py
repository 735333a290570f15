"""`rloom doctor env`"""

import argparse
from collections.abc import Sequence
from typing import get_args

from rloom.cli.parsing import epilog
from rloom.console import run_safely


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom doctor", description="Check this machine's installation.")
    commands = parser.add_subparsers(dest="command", required=True)
    environment = commands.add_parser(
        "env",
        help="what is installed, and what works here",
        description="Packages, GPUs and features, with the command that installs what is missing.",
        **epilog("rloom doctor env --json", "0 training with the defaults works · 1 it does not"),
    )
    environment.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)

    def run() -> int:
        from rloom.config.rollout_section import RolloutSection
        from rloom.doctor import env

        return env.run(get_args(RolloutSection.model_fields["name"].annotation), as_json=given.json)

    return run_safely(run)
