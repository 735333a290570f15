"""Shared by all commands: lines about the start, Hydra's flags, and user errors without a traceback."""

import errno
import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from typing import TextIO

from rloom.errors import ConfigError, RloomError, WorkerError
from rloom.language import translate
from rloom.terminal import accept_any_text, discard_output, fitted, printable

log = logging.getLogger(__name__)
STARTED_S = time.monotonic()  # the commands import this module first

OK = 0
FAULTS = 1  # a check found faults, or there is no score; a traceback, which is a bug, ends with it too
USER_ERROR = 2
LOST = 3  # a worker or machine of the run: the same command resumes
INTERRUPTED = 130
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # any file of a run may be the one that has no room
HYDRA_FLAGS = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
}


def announce(text: str) -> None:
    """Log a line about the start of a command, with the seconds since it started."""
    log.info(f"[{time.monotonic() - STARTED_S:5.1f} s] {text}")


def split_hydra_flags(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(key=value overrides, arguments of `load_config`): --config-path and --config-name as in Hydra."""
    overrides: list[str] = []
    source: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flag, given, value = argument.partition("=")
        if flag not in HYDRA_FLAGS:
            raise ConfigError(f"{flag} is not a flag of this command; use key=value, --config-path or --config-name")
        source[HYDRA_FLAGS[flag]] = value if given else next(rest, "")
        if not source[HYDRA_FLAGS[flag]]:
            raise ConfigError(f"{flag} needs a value: a folder, or the name of a YAML file in it")
    return overrides, source


class _Formatter(logging.Formatter):
    """Log lines quote data, answers and names. A traceback stays as it is."""

    def format(self, record: logging.LogRecord) -> str:
        own = copy(record)  # other handlers get the English one
        own.msg, own.args = fitted(translate(record.getMessage()), sys.stderr), ()
        return printable(super().format(own))


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is now: while progress bars are shown, rich prints above them what is written there."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def run_safely(command: Callable[[], int]) -> int:
    """Run a command and print user errors without a traceback."""
    accept_any_text()
    ours = logging.getLogger("rloom")
    ours.setLevel(logging.INFO)
    handler = _Handler()
    handler.setFormatter(_Formatter())
    ours.handlers = [handler]
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # torch's stack trace on a CPU without bfloat16 arithmetic
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)
    try:
        status = command()
        sys.stdout.flush()  # Python's own flush at the end would report a closed pipe
        return status
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:  # else a training run has said what it saved
            print(translate("Stopped."), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `rloom config | head`
        discard_output()
        return OK
    except RloomError as error:
        kind = "configuration" if isinstance(error, ConfigError) else type(error).__name__.removesuffix("Error").lower()
        print_error(kind, error)
        return LOST if isinstance(error, WorkerError) and error.lost else USER_ERROR
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        print_error("disk", error)
        return USER_ERROR


def print_error(kind: str, error: Exception) -> None:
    lines = [f"rloom: {translate(f'{kind} error')}: {translate(str(error))}"]
    lines += map(translate, getattr(error, "__notes__", []))
    print(fitted("\n".join(lines), sys.stderr), file=sys.stderr)


def run_with_keys(
    usage: str, arguments: Sequence[str] | None, train: Callable[[list[str], dict[str, str]], int]
) -> int:
    """A command of key=value arguments; None: those of this process. `train` gets what `split_hydra_flags` returns."""
    given = sys.argv[1:] if arguments is None else arguments
    if "-h" in given or "--help" in given:
        print(translate(usage))
        return OK
    return run_safely(lambda: train(*split_hydra_flags(given)))
