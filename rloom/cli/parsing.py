"""The argparse parser of a command, with an example and its exit codes below the flags."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from rloom.language import translate

USER_ERRORS = "2 an error that you can correct"
RUNS_FOLDERS = ("checkpoints", "outputs/checkpoints")  # where runs are by default: of `rloom train`, of train.sh


class CommandParser(argparse.ArgumentParser):
    """Help and errors in the terminal's language."""

    def format_help(self) -> str:
        self.description, self.epilog = translate(self.description or ""), translate(self.epilog or "")
        for group in self._action_groups:
            group.title = translate(group.title or "")
        below = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        for action in (*self._actions, *(named for each in below for named in each._get_subactions())):
            action.help = translate(action.help) if action.help else action.help
        return _with_usage(super().format_help())

    def format_usage(self) -> str:
        return _with_usage(super().format_usage())

    def error(self, message: str) -> NoReturn:
        super().error(translate(message))


def _with_usage(text: str) -> str:
    return text.replace("usage:", translate("usage:"), 1)


def epilog(example: str, exit_codes: str = f"0 done · {USER_ERRORS}") -> dict[str, Any]:
    """Arguments of a parser or sub-parser."""
    return {
        "epilog": f"example:\n  {example}\n\nexit codes: {exit_codes}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def default_run_folders() -> list[Path]:
    """Those that exist below the current directory; else the first, which an error then names."""
    return [Path(name) for name in RUNS_FOLDERS if Path(name).is_dir()] or [Path(RUNS_FOLDERS[0])]
