"""The run directory: may we write there, is anyone else, and where does this run start from."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rloom.config.load import expand
from rloom.config.schema import Config
from rloom.errors import CheckpointError, ConfigError
from rloom.observe.records import METRICS_FILE
from rloom.trainer.checkpoint import Checkpoints, read_state

KEY = "trainer.default_local_dir"


def run_directory(config: Config) -> Path:
    """All that the run will write to is writable, and what it is to go on from is there; nothing is written yet."""
    trainer = config.trainer
    dumps = {
        "trainer.rollout_data_dir": trainer.rollout_data_dir,
        "trainer.validation_data_dir": trainer.validation_data_dir,
    }
    for key, path in dumps.items():
        if path is not None:
            writable(key, path)
    named_start(config)
    return writable(KEY, trainer.default_local_dir)


def writable(key: str, path: str) -> Path:
    directory = expand(path).absolute()
    # os.path, unlike pathlib, also says "not there" of what may not be looked at
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise ConfigError(f"{key}={directory}: {existing} is a file; choose another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={directory}: {existing} cannot be written to; choose another directory")
    return directory


def named_start(config: Config) -> Path | None:
    """The checkpoint that the configuration names, if it names one."""
    if config.trainer.resume_from_path is None:
        return None
    start = expand(config.trainer.resume_from_path)
    if not start.is_dir():
        raise CheckpointError(
            f"trainer.resume_from_path={start}: there is no such folder; give a global_step_N folder of a run, "
            "or trainer.resume_mode=auto without a path"
        )
    return start


@contextmanager
def sole_owner(directory: Path) -> Iterator[None]:
    """Two runs in one directory would overwrite each other's checkpoints."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("a+")
    except OSError as error:
        raise ConfigError(f"{KEY}={directory} cannot be written to ({error.strerror}); choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{KEY}={directory}: another run is using it; wait for it to end, or choose another directory"
            ) from error
        yield


def starting_point(config: Config, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint this run goes on from."""
    checkpoints.clean()
    return checkpoints.newest() if config.trainer.resume_mode == "auto" else named_start(config)


def last_of_this_run(config: Config, checkpoints: Checkpoints) -> Path | None:
    """Where a run that lost a worker goes on: what an earlier run left was set aside when it began."""
    checkpoints.clean()
    return checkpoints.newest() or named_start(config)


def make_room(checkpoints: Checkpoints, start: Path | None) -> None:
    """What an earlier run left beyond the starting point is set aside, never overwritten."""
    if start is None:
        checkpoints.set_aside(0, checkpoints.directory / METRICS_FILE)
    else:
        checkpoints.set_aside(after=int(read_state(start)["step"]))
