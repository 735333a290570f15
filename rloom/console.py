"""What every command shares: reading Hydra's own flags, and errors that are read by people."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from rloom.errors import ConfigError, RloomError

INTERRUPTED = 130
HYDRA_FLAGS = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
}


def split_hydra_flags(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(key=value overrides, where the configuration comes from): --config-path and --config-name as in Hydra."""
    overrides: list[str] = []
    source: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flag, given, value = argument.partition("=")
        if flag not in HYDRA_FLAGS:
            raise ConfigError(f"{flag} is no flag of this command; it takes key=value, --config-path, --config-name")
        source[HYDRA_FLAGS[flag]] = value if given else next(rest, "")
        if not source[HYDRA_FLAGS[flag]]:
            raise ConfigError(f"{flag} needs a value: a folder, or the name of a YAML file in it")
    return overrides, source


def run_safely(command: Callable[[], int]) -> int:
    """Run a command; an error that its user can mend is shown without a traceback."""
    ours = logging.getLogger("rloom")
    ours.setLevel(logging.INFO)
    ours.handlers = [logging.StreamHandler()]
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # torch's stack trace on a CPU without bfloat16 arithmetic; `placement` says it in a sentence
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
    try:
        return command()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `rloom config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except RloomError as error:
        kind = "configuration" if isinstance(error, ConfigError) else type(error).__name__.removesuffix("Error").lower()
        print(f"rloom: {kind} error: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        return 2
