"""Checkpoints: written to a temporary folder, hashed, synced and renamed, so that a crash never damages the last one.

The workers copy what is saved, and write, hash and sync the copy while training goes on. A thread of the driver waits
for their reports, seals the folder and renames it.

    RUN/global_step_20/            actor/  critic/  trainer_state.json  identity.json  config.yaml  seal.json
    RUN/latest_checkpointed_iteration.txt

A seal lists the files of its folder with size and SHA-256; a file that does not match is damaged. A seal detects damage
but not manipulation, since anyone can write a new seal. So nothing in a checkpoint is executed, and everything is
checked when it is read.
"""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from rloom.atomic import replace_text, sync
from rloom.errors import CheckpointError
from rloom.hashed_files import WRITTEN, file_sha256, read_report, report_of

SEAL = "seal.json"
STATE = "trainer_state.json"
LATEST = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
PREFIX = "global_step_"
DISCARDED = ".discarded-"
FORMAT = 2  # of a checkpoint; 1 contained pickles (optimizer.pt, *.distcp)


POLL_S = 0.05
STALLED_S = 30.0  # a disk has written something by then


def do_nothing(*arguments: Any) -> None: ...


@dataclass(frozen=True)
class Writing:
    """What workers write into a draft."""

    files: Sequence[Path] = ()  # each gets a report when it is complete (hashed_files.py)
    check: Callable[[bool], None] = do_nothing  # raises what stopped a worker; True: waits until all have ended


Write = Callable[[Path], Writing | None]


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run directory."""

    directory: Path
    keep: Mapping[str, int | None]  # role -> newest checkpoints that keep its folder; None: all

    def steps(self) -> list[int]:
        """Steps with a checkpoint, oldest first."""
        numbers = [path.name.removeprefix(PREFIX) for path in self.directory.glob(f"{PREFIX}*") if path.is_dir()]
        return sorted(int(number) for number in numbers if number.isdigit())

    def path(self, step: int) -> Path:
        return self.directory / f"{PREFIX}{step}"

    def newest(self) -> Path | None:
        """The newest checkpoint, checked. If it is damaged, the error names the newest good one."""
        steps = self.steps()
        if not steps:
            return None
        newest = self.path(steps[-1])
        fault = self.find_fault(steps[-1])
        if fault is None:
            return newest
        good = next((self.path(step) for step in reversed(steps[:-1]) if self.find_fault(step) is None), None)
        offer = (
            f"the newest good one is {good}: resume from it with trainer.resume_mode=resume_path "
            f"trainer.resume_from_path={good}"
            if good
            else "there is no other; start anew with trainer.resume_mode=disable"
        )
        raise CheckpointError(f"{newest} is damaged: {fault}; {offer}")

    def find_fault(self, step: int) -> str | None:
        """Why no run can resume from a checkpoint, or None. Pruning removes roles from older ones."""
        for role in self.keep:
            if not (self.path(step) / role).is_dir():
                return f"{self.path(step) / role} is missing (the run that saved it had none, or it was pruned)"
        return find_fault(self.path(step))

    def save(self, step: int, write: Write, state: Mapping[str, Any], *, best: int | None = None) -> Path:
        return self.begin(step, write, state, best=best).finish()

    def begin(
        self,
        step: int,
        write: Write,
        state: Mapping[str, Any],
        *,
        best: int | None = None,
        after: Callable[[], None] = do_nothing,
    ) -> "Saving":
        """`write` writes the folders of the roles into the given folder. `best`: a step that is not pruned. `after` is
        called in another thread, once the checkpoint is complete."""
        # a name of its own: who still writes into an earlier draft of this step does not reach this one
        draft = self.directory / f".writing-{PREFIX}{step}.{token_hex(4)}"
        with self.discarded_after_errors(step, draft):
            draft.mkdir(parents=True)
            writing = write(draft) or Writing()
            (draft / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1))
        return Saving(self, step, draft, writing, best, after)

    @contextmanager
    def discarded_after_errors(self, step: int, draft: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # an incomplete checkpoint only uses disk space
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError):
                message = f"{self.path(step)} cannot be written: {error}; the checkpoints before it are complete"
                raise CheckpointError(message) from error
            raise

    def publish(self, step: int, draft: Path, best: int | None) -> None:
        """A draft in which everything is written becomes the newest checkpoint; older ones are pruned."""
        with self.discarded_after_errors(step, draft):
            for folder in (*(path for path in draft.iterdir() if path.is_dir()), draft):
                seal(folder)
            draft.rename(self.path(step))
            sync(self.directory)
            self.point_to_latest()
            self.prune(best)

    def prune(self, best: int | None = None) -> None:
        steps = self.steps()
        for role, kept in self.keep.items():
            holders = [step for step in steps if (self.path(step) / role).is_dir()]
            for step in holders[:-kept] if kept else []:
                if step != best:
                    discard(self.path(step) / role)
        for step in steps:
            if not any((self.path(step) / role).is_dir() for role in self.keep):
                discard(self.path(step))

    def set_aside(self, after: int, *others: Path) -> Path | None:
        """Move checkpoints of later steps, and other files, to another folder: the new run writes its own."""
        later = [self.path(step) for step in self.steps() if step > after]
        later += [path for path in others if path.exists()]
        if not later:
            return None
        name = time.strftime("superseded-%Y%m%d-%H%M%S")
        places = (self.directory / (f"{name}-{number}" if number else name) for number in count())
        place = next(place for place in places if not place.exists())
        place.mkdir()
        for path in later:
            path.rename(place / path.name)
        self.point_to_latest()
        return place

    def point_to_latest(self) -> None:
        steps = self.steps()
        if steps:
            replace_text(self.directory / LATEST, str(steps[-1]))
        else:
            (self.directory / LATEST).unlink(missing_ok=True)

    def point_to_best(self, step: int | None) -> None:
        """After its checkpoint was saved. None: there is none."""
        if step is not None and self.path(step).is_dir():
            replace_text(self.directory / BEST, str(step))
        else:
            (self.directory / BEST).unlink(missing_ok=True)

    def discard(self, step: int) -> None:
        if self.path(step).is_dir():
            discard(self.path(step))

    def clean(self) -> None:
        """Remove folders that a crash left incomplete."""
        for pattern in (f".writing-{PREFIX}*", f"{DISCARDED}*", f"{PREFIX}*/{DISCARDED}*"):
            for path in self.directory.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)


class Saving:
    """A checkpoint that is being written. A thread seals it when all its files have reports."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        step: int,
        draft: Path,
        writing: Writing,
        best: int | None,
        after: Callable[[], None],
    ) -> None:
        self.checkpoints, self.step, self.draft, self.writing = checkpoints, step, draft, writing
        self.best, self.after = best, after
        self.failure: BaseException | None = None
        self.given_up = threading.Event()
        self.thread = threading.Thread(target=self.complete, name=f"saving step {step}", daemon=True)
        self.thread.start()

    def complete(self) -> None:
        try:
            for file in self.writing.files:
                while not report_of(file).exists():
                    if self.given_up.wait(POLL_S):
                        return
            self.checkpoints.publish(self.step, self.draft, self.best)
            self.after()
        except BaseException as error:
            self.failure = error

    @property
    def is_over(self) -> bool:
        return not self.thread.is_alive()

    def check(self) -> None:
        """Raise what stopped it so far."""
        self.ask(wait=False)
        if self.failure is not None:
            raise self.failure

    def finish(self) -> Path:
        """Wait for it; raise what stopped it."""
        self.ask(wait=True)
        self.thread.join()
        self.check()
        return self.checkpoints.path(self.step)

    def ask(self, *, wait: bool) -> None:
        try:
            self.writing.check(wait)
        except CheckpointError:
            self.give_up()
            raise

    def settle(self) -> None:
        """After an error, when workers may not answer: wait as long as files grow. What is not complete then is
        discarded."""
        size = -1
        while self.thread.is_alive() and (now := folder_bytes(self.draft)) != size:
            size = now
            self.thread.join(STALLED_S)
        self.give_up()

    def give_up(self) -> None:
        self.given_up.set()
        self.thread.join()
        shutil.rmtree(self.draft, ignore_errors=True)


def folder_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    except OSError:  # it was renamed meanwhile
        return 0


def verify_checkpoint(checkpoint: Path) -> None:
    """Compare a checkpoint folder with its seals. Reads every byte."""
    if not (checkpoint / STATE).is_file():
        raise CheckpointError(
            f"{checkpoint} is not a checkpoint of rloom: it has no {STATE}; use a {PREFIX}N folder of a run"
        )
    fault = find_fault(checkpoint)
    if fault is not None:
        raise CheckpointError(f"{checkpoint} is damaged: {fault}")
    read_state(checkpoint)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Step, KL coefficient, data position and running moments of the reward of a verified checkpoint."""
    file = checkpoint / STATE
    state = read_json(file)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint} was written by another version of rloom ({file} has format {state.get('format', 1)}, this "
            f"version reads {FORMAT}; format 1 contained pickles, which are not opened). Export it with the version "
            "that wrote it, or start anew in another trainer.default_local_dir or with trainer.resume_mode=disable"
        )
    step, stream = state.get("step"), state.get("stream")
    coefficient = state.setdefault("kl_coefficient", 0.0)  # supervised fine-tuning has none
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{file} is damaged: its step is {step!r}; take another checkpoint")
    if not isinstance(coefficient, int | float) or not math.isfinite(coefficient) or coefficient < 0:
        raise CheckpointError(f"{file} is damaged: its kl_coefficient is {coefficient!r}; take another checkpoint")
    if not isinstance(stream, dict):
        raise CheckpointError(f"{file} is damaged: its stream is {stream!r}; take another checkpoint")
    if not isinstance(state.setdefault("reward", {}), dict):  # earlier versions saved none
        raise CheckpointError(f"{file} is damaged: its reward is {state['reward']!r}; take another checkpoint")
    return state


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    try:
        return parse_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); take another checkpoint") from error


def parse_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return content


def seal(folder: Path) -> None:
    """Write the size and hash of every file to the seal, and sync all files to disk.

    A file with a report was hashed and synced by its writer, perhaps on another machine.
    """
    entries = {}
    for file in sorted(files_of(folder)):
        report = read_report(file)
        if report is None:
            report = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
            sync(file)
        else:
            report_of(file).unlink()
        entries[str(file.relative_to(folder))] = report
    (folder / SEAL).write_text(json.dumps(entries, indent=1))
    sync(folder / SEAL)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(inner)


def find_fault(checkpoint: Path) -> str | None:
    """The first fault of a checkpoint, or None."""
    roles = (path for path in checkpoint.iterdir() if path.is_dir() and not path.name.startswith(DISCARDED))
    for folder in (checkpoint, *roles):
        try:
            entries = [sealed(name, entry) for name, entry in parse_json(folder / SEAL).items()]
        except (OSError, ValueError) as error:
            return f"{folder / SEAL} cannot be read ({error})"
        for name, size, sha256 in entries:
            fault = file_fault(folder / name, size, sha256)
            if fault is not None:
                return fault
    return None


def file_fault(file: Path, size: int, sha256: str) -> str | None:
    try:
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes instead of {size}"
        return None if file_sha256(file) == sha256 else f"{file} does not match its checksum"
    except OSError as error:
        return f"{file} cannot be read ({error})"


def sealed(name: str, entry: Any) -> tuple[str, int, str]:
    """(file, bytes, sha256) of one entry of a seal, which may only name files of its folder."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} is not in that folder")
    if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
        raise ValueError(f"{name!r} has no size and checksum")
    return name, entry["bytes"], entry["sha256"]


def files_of(folder: Path) -> list[Path]:
    """The files in a folder's seal: its own, and those of subfolders without a seal."""
    found = []
    for path in folder.iterdir():
        if path.is_dir() and not (path / SEAL).exists():
            found += files_of(path)
        elif path.is_file() and path.name != SEAL and not path.name.endswith(WRITTEN):
            found.append(path)
    return found


def discard(folder: Path) -> None:
    """Rename, then delete: a crash leaves no incomplete folder under its original name.

    NFS keeps a file that is deleted while another process reads it, and with it the folder: `clean` removes it later.
    """
    hidden = folder.with_name(f"{DISCARDED}{folder.name}.{token_hex(4)}")
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
