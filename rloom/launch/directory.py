"""The run directory: write access, the lock against a second run, and the checkpoint to resume from."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rloom.config.base import RunConfig
from rloom.config.load import expand
from rloom.errors import CheckpointError, ConfigError
from rloom.runs.events import EVENTS_FILE
from rloom.runs.records import METRICS_FILE
from rloom.training.checkpoint import Checkpoints, read_state, verify_checkpoint

log = logging.getLogger(__name__)
KEY = "trainer.default_local_dir"
LOCK = ".lock"
WRITTEN = (METRICS_FILE, EVENTS_FILE, "rollouts")  # by a run, beside checkpoints
OWNER = ".lock.owner"  # on file systems without flock: host and process id of the run


def run_directory(config: RunConfig) -> Path:
    """Check that the run's output folders are writable and its starting checkpoint exists. Writes nothing."""
    for key, path in config.trainer.output_folders.items():
        if path is not None:
            writable(key, path)
    named_start(config)
    return writable(KEY, config.trainer.default_local_dir)


def writable(key: str, path: str) -> Path:
    directory = expand(path).absolute()
    # os.path.exists, unlike pathlib, returns False for a path without read permission
    existing = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not existing.is_dir():
        raise ConfigError(f"{key}={directory}: {existing} is a file; choose another directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={directory}: {existing} cannot be written to; choose another directory")
    return directory


def named_start(config: RunConfig) -> Path | None:
    """The checkpoint that the configuration names, if it names one."""
    if config.trainer.resume_from_path is None:
        return None
    start = expand(config.trainer.resume_from_path)
    if not start.is_dir():
        raise CheckpointError(
            f"trainer.resume_from_path={start}: there is no such folder; use a global_step_N folder of a run, "
            "or trainer.resume_mode=auto without a path"
        )
    return start


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Two runs in one directory would overwrite each other's checkpoints. Removes a directory that stays empty."""
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"{KEY}={directory} cannot be written to ({error.strerror}); choose another") from error
    with lock:
        has_flock = take_flock(lock, directory)
        if not has_flock:
            take_by_name(directory)
        try:
            yield
        finally:
            if not has_flock:
                (directory / OWNER).unlink(missing_ok=True)
            if {path.name for path in directory.iterdir()} == {LOCK}:
                (directory / LOCK).unlink()
            with suppress(OSError):  # a folder that is not empty; its parents are not empty either
                for path in created:
                    path.rmdir()


def take_flock(lock: IO[str], directory: Path) -> bool:
    """False: the file system does not support flock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise in_use(directory, "another run is using it") from error
        log.warning(
            f"{directory}: its file system has no locks ({error.strerror}); {directory / OWNER} marks it as in use"
        )
        return False
    # a run that wrote nothing removes the file when it ends: the lock must be on the file that exists now
    if not (directory / LOCK).exists() or not os.path.samestat(os.fstat(lock.fileno()), (directory / LOCK).stat()):
        raise in_use(directory, "another run has just ended in it")
    return True


def take_by_name(directory: Path) -> None:
    """Create a file that only one process can create. The file of a dead process of this machine is replaced."""
    file, this_process = directory / OWNER, {"host": socket.gethostname(), "pid": os.getpid()}
    if file.exists() and is_stale(file):
        file.unlink(missing_ok=True)
    try:
        with file.open("x") as stream:
            json.dump(this_process, stream)
    except FileExistsError as error:
        owner = f"the run of {file} ({file.read_text()}) is using it; if that run has ended, remove the file"
        raise in_use(directory, owner) from error


def is_stale(file: Path) -> bool:
    try:
        owner = json.loads(file.read_text())
        host, process = owner["host"], int(owner["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return False
    if process == os.getpid():  # of an earlier process with the same id
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


class DirectoryInUse(ConfigError):
    pass


def in_use(directory: Path, why: str) -> ConfigError:
    return DirectoryInUse(f"{KEY}={directory}: {why}; wait for it to end, or choose another directory")


def open_checkpoint(checkpoint: Path) -> Path:
    """A checkpoint, compared with its seals, with the header of every tensor file checked."""
    verify_checkpoint(checkpoint)
    check_tensors(checkpoint)
    return checkpoint


def check_tensors(checkpoint: Path) -> None:
    from rloom.engines.storage import check_folder  # imports torch; other checks of this module come before it

    for role in (path for path in checkpoint.iterdir() if path.is_dir()):
        check_folder(role)


def starting_point(config: RunConfig, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint that this run resumes from, checked."""
    if config.trainer.resume_mode != "auto":
        checkpoints.clean()
        named = named_start(config)
        return None if named is None else open_checkpoint(named)
    return newest(checkpoints)


def newest(checkpoints: Checkpoints) -> Path | None:
    checkpoints.clean()
    found = checkpoints.newest()
    if found is not None:
        read_state(found)
        check_tensors(found)
    return found


def last_of_this_run(config: RunConfig, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint to resume from after a lost worker. Those of earlier runs were moved away at the start."""
    return newest(checkpoints) or starting_point(config, checkpoints)


def set_aside_later(checkpoints: Checkpoints, start: Path | None) -> None:
    """Move away what an earlier run wrote after the starting point, so that it is not overwritten."""
    if start is None:
        checkpoints.set_aside(0, *(checkpoints.directory / name for name in WRITTEN))
    else:
        checkpoints.set_aside(after=int(read_state(start)["step"]))
