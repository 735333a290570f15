"""`python -m rloom.cli.train_ppo_ray ...`, the same as `rloom openrlhf`: OpenRLHF's command with the name replaced."""

import sys
from collections.abc import Sequence

from rloom.cli import openrlhf


def main(arguments: Sequence[str] | None = None) -> int:
    return openrlhf.main(list(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
