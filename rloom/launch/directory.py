"""The run directory: which one a run gets, write access, the lock against a second run, the checkpoint to resume from.

A directory holds the run whose config.yaml it has. It is another run if a key differs that is not declared `same_run`;
then a run whose directory the user has not named gets one with a number beside it. So it does beside a run that has
ended, if it has other machines, and beside a run on other rows of the same file. Every machine of a run comes to the
same directory: the rows, which machine 0 alone reads, decide nothing in a run of several. Imports no torch.
"""

import errno
import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, Generic

from rloom.atomic import replace_text
from rloom.config.base import RunConfig
from rloom.config.from_checkpoint import config_text, other_training, saved_differences
from rloom.config.frontends.smoke import is_on, shown
from rloom.config.load import C, expand, moved
from rloom.console import announce
from rloom.errors import CheckpointError, ConfigError
from rloom.runs.records import EVENTS_FILE, METRICS_FILE, SCHEDULE_FILE
from rloom.runs.run_folder import CONFIG_FILE, RunFolder, is_alive
from rloom.training.checkpoint import PREFIX, Checkpoints, parse_json, read_state, verify_checkpoint

log = logging.getLogger(__name__)
KEY = "trainer.default_local_dir"
IDENTITY_FILE = "identity.json"  # what the run is by content, in its directory and in every checkpoint
CONTENT = "rows"  # entry of that file: digest of the training rows
LENGTH = ("trainer.total_epochs", "trainer.total_training_steps")
MACHINES = ("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device", "trainer.backend")
LOCK = ".lock"
WRITTEN = (METRICS_FILE, EVENTS_FILE, "rollouts", SCHEDULE_FILE)  # by a run, beside checkpoints
OWNER = ".lock.owner"  # on file systems without flock: host and process id of the run


def has_files(folder: Path) -> bool:
    """Or is one. The model can be written beside subfolders, such as the run directory."""
    return folder.is_file() or (folder.exists() and not all(entry.is_dir() for entry in folder.iterdir()))


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
    return not is_alive(process)


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


WAIT_S = 10.0  # for the config.yaml of a run that has just locked its directory
MOST_KEYS = 3  # keys that the note about another run shows


def directory_of(config: C) -> Path:
    """The directory that the run has, or would get now."""
    return expand(in_directory(config).trainer.default_local_dir).absolute()


def in_directory(config: C) -> C:
    """The configuration with that directory."""
    if not is_numbered(config):
        return config
    places = Places(config)
    return places.config_at(places.choose())


@contextmanager
def claimed(config: C, content: str | None = None) -> Iterator[C]:
    """The configuration with the run's directory, which is locked. Another run that starts now sees whose it is.

    `content`: digest of the training rows.
    """
    if not is_numbered(config) or config.only_validates:
        own = in_directory(config)
        with locked(run_directory(own)):
            yield own
        return
    places = Places(config, content)
    with ExitStack() as stack:
        number = places.lock(stack)
        directory, own = places.path(number), places.config_at(number)
        is_new = places.differences(directory) != {}
        if is_new:
            replace_text(directory / CONFIG_FILE, config_text(own))
        if number > 1 and (note := places.note(number)):
            announce(note)
        try:
            yield own
        finally:
            if is_new and {path.name for path in directory.iterdir()} <= {LOCK, OWNER, CONFIG_FILE}:
                (directory / CONFIG_FILE).unlink()


def is_numbered(config: C) -> bool:
    """A smoke run sets aside what an earlier one left in its directory, whatever that trained."""
    return config.numbers_runs and not is_on(os.environ)


class Places(Generic[C]):
    """DIR, DIR-2, DIR-3, ... of one configuration, by number."""

    def __init__(self, config: C, content: str | None = None) -> None:
        self.config = config
        self.content = content if config.trainer.nnodes == 1 else None
        self.base = config.trainer.default_local_dir

    def text(self, number: int) -> str:
        return self.base if number == 1 else f"{self.base}-{number}"

    def path(self, number: int) -> Path:
        return expand(self.text(number)).absolute()

    def config_at(self, number: int) -> C:
        if number == 1:
            return self.config
        return moved(self.config, self.text(number), f"{self.config.trainer.experiment_name}-{number}")

    @property
    def numbers(self) -> list[int]:
        """Numbers of the directories that exist."""
        first = self.path(1)
        name = re.compile(rf"{re.escape(first.name)}(?:-([2-9]|[1-9]\d+))?")
        folders = first.parent.iterdir() if first.parent.is_dir() else ()
        return sorted(int(found[1] or 1) for path in folders if (found := name.fullmatch(path.name)))

    def differences(self, directory: Path) -> dict[str, Any] | None:
        """The saved values that differ from this run's. Empty: the directory holds this run; None: it holds no run."""
        file = directory / CONFIG_FILE
        try:
            if not file.is_file():
                return None
            return other_training(file, self.config) or self.other_machines(file) or self.other_rows(directory)
        except ConfigError:
            return {CONFIG_FILE: "unreadable"}

    def other_machines(self, file: Path) -> dict[str, Any]:
        """Those of a run that has ended, which this command would not continue; with more steps it would. GPUs that
        are not given do not count: the same command may start on another machine."""
        found = saved_differences(file, self.config, [key for key in MACHINES if self.config.is_given(key)])
        longer = saved_differences(file, self.config, LENGTH)
        return found if found and not longer and has_ended(file.parent) else {}

    def other_rows(self, directory: Path) -> dict[str, Any]:
        if self.content is None or not (directory / IDENTITY_FILE).is_file():
            return {}
        try:
            saved = parse_json(directory / IDENTITY_FILE).get(CONTENT)
        except (OSError, ValueError):
            return {}
        return {} if saved in (None, self.content) else {"data.train_files": "other rows in the same files"}

    def choose(self, busy: Collection[int] = ()) -> int:
        """The directory of this run, else the first that holds none. `busy`: directories of runs that began just now.

        A validation reads a run, also with other keys: if none has these keys, the first.
        """
        found = {number: self.differences(self.path(number)) for number in self.numbers}
        own = [number for number, differing in found.items() if differing == {}]
        if own or self.config.only_validates:
            return own[0] if own else 1
        return next(n for n in count(1) if n not in busy and has_no_run(self.path(n)))

    def lock(self, stack: ExitStack) -> int:
        """The number of the directory that is now locked."""
        busy: set[int] = set()
        until = time.monotonic() + WAIT_S
        while True:
            number = self.choose(busy)
            directory = self.path(number)
            lock = ExitStack()
            try:
                lock.enter_context(locked(directory))
            except DirectoryInUse:
                differing = self.differences(directory)
                if differing == {} or time.monotonic() > until:
                    raise
                if differing:
                    busy.add(number)
                else:
                    time.sleep(0.05)
                continue
            if self.differences(directory) == {} or has_no_run(directory):
                stack.push(lock.pop_all())
                return number
            lock.close()  # another run began and ended in it since

    def note(self, number: int) -> str:
        """Why the directory has a number: the most similar run before it."""
        earlier = {n: self.differences(self.path(n)) for n in self.numbers if n != number}
        others = [(len(differing), n, differing) for n, differing in earlier.items() if differing]
        if not others:
            return ""
        amount, nearest, differing = min(others)
        keys = ", ".join(f"{key}={shown(value)}" for key, value in [*differing.items()][:MOST_KEYS])
        more = f" and {amount - MOST_KEYS} more keys" if amount > MOST_KEYS else ""
        return f"{self.text(number)}: {self.text(nearest)} holds a run with {keys}{more}"


def has_ended(directory: Path) -> bool:
    """It has done all of its steps."""
    state = RunFolder(directory).state
    return state.total_steps is not None and state.step >= state.total_steps


def has_no_run(directory: Path) -> bool:
    """It has no configuration, or only that of a run that ended before its first step."""
    if not (directory / CONFIG_FILE).is_file():
        return True
    metrics = directory / METRICS_FILE
    return not any(directory.glob(f"{PREFIX}*")) and not (metrics.is_file() and metrics.stat().st_size)
