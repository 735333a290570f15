"""The argparse parser of a command, with an example and its exit codes below the flags."""

import argparse
from typing import Any

USER_ERRORS = "2 an error that you can correct"
RUNS_FOLDER = "checkpoints"  # trainer.default_local_dir is below it by default


def epilog(example: str, exit_codes: str = f"0 done · {USER_ERRORS}") -> dict[str, Any]:
    """Arguments of a parser or sub-parser."""
    return {
        "epilog": f"example:\n  {example}\n\nexit codes: {exit_codes}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
