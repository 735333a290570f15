"""Which directory a run gets: the one that its keys name, or one with a number beside it if that holds another run.

A directory holds the run whose config.yaml it has. It is another run if a key differs that is not declared `same_run`.
The choice reads only that file, so that every machine of a run comes to the same one. Imports no torch.
"""

import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Generic

from rloom.atomic import replace_text
from rloom.config.from_checkpoint import config_text, other_training
from rloom.config.frontends.smoke import is_on, shown
from rloom.config.load import C, expand, moved
from rloom.console import announce
from rloom.errors import ConfigError
from rloom.launch.directory import LOCK, OWNER, DirectoryInUse, locked, run_directory
from rloom.runs.records import METRICS_FILE
from rloom.runs.run_folder import CONFIG_FILE
from rloom.training.checkpoint import PREFIX

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
def claimed(config: C) -> Iterator[C]:
    """The configuration with the run's directory, which is locked. Another run that starts now sees whose it is."""
    if not is_numbered(config) or config.only_validates:
        own = in_directory(config)
        with locked(run_directory(own)):
            yield own
        return
    places = Places(config)
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

    def __init__(self, config: C) -> None:
        self.config = config
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
            return other_training(file, self.config) if file.is_file() else None
        except ConfigError:
            return {CONFIG_FILE: "unreadable"}

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


def has_no_run(directory: Path) -> bool:
    """It has no configuration, or only that of a run that ended before its first step."""
    if not (directory / CONFIG_FILE).is_file():
        return True
    metrics = directory / METRICS_FILE
    return not any(directory.glob(f"{PREFIX}*")) and not (metrics.is_file() and metrics.stat().st_size)
