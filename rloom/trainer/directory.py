"""The run directory: may we write there, is anyone else, and where does this run start from."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rloom.config.load import expand
from rloom.config.schema import Config
from rloom.errors import CheckpointError, ConfigError
from rloom.trainer.checkpoint import Checkpoints, read_state

KEY = "trainer.default_local_dir"


def run_directory(config: Config) -> Path:
    """Known to be writable, without having written anything."""
    directory = expand(config.trainer.default_local_dir).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{KEY}={directory}: {existing} is a file; choose another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{KEY}={directory}: {existing} cannot be written to; choose another directory")
    return directory


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
    """The checkpoint this run goes on from. Later ones of another course are set aside, never overwritten."""
    checkpoints.clean()
    trainer = config.trainer
    if trainer.resume_mode == "auto":
        return checkpoints.newest()
    start = None
    if trainer.resume_mode == "resume_path":
        start = expand(trainer.resume_from_path or "")
        if not start.is_dir():
            raise CheckpointError(f"trainer.resume_from_path={start}: there is no such folder")
    step = int(read_state(start)["step"]) if start is not None else 0
    checkpoints.set_aside(after=step)
    return start
