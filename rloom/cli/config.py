"""`rloom config [key]`"""

import argparse
from collections.abc import Sequence

from rloom.cli.parsing import epilog
from rloom.console import run_safely


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "rloom config",
        description="Print every key with its default and meaning as YAML, or explain one key.",
        **epilog("rloom config kl_coef"),
    )
    parser.add_argument("key", nargs="?", help="a dotted key, or part of one")
    parser.add_argument("--sft", action="store_true", help="the configuration of `rloom sft`")
    given = parser.parse_args(arguments)

    def show() -> int:
        from rloom.config.describe import explain, whole_tree
        from rloom.config.schema import Config, SftConfig

        root = SftConfig if given.sft else Config
        print(explain(given.key, root) if given.key else whole_tree(root))
        return 0

    return run_safely(show)
