"""The argparse parser of a command, with an example and its exit codes below the flags."""

import argparse
from pathlib import Path
from typing import Any

USER_ERRORS = "2 an error that you can correct"
RUNS_FOLDERS = ("checkpoints", "outputs/checkpoints")  # where runs are by default: of `rloom train`, of train.sh


def epilog(example: str, exit_codes: str = f"0 done · {USER_ERRORS}") -> dict[str, Any]:
    """Arguments of a parser or sub-parser."""
    return {
        "epilog": f"example:\n  {example}\n\nexit codes: {exit_codes}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def default_run_folders() -> list[Path]:
    """Those that exist below the current directory; else the first, which an error then names."""
    return [Path(name) for name in RUNS_FOLDERS if Path(name).is_dir()] or [Path(RUNS_FOLDERS[0])]
