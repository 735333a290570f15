"""What was computed from data files, kept on disk: checked rows, and the texts and tokens of prompts.

    ~/.cache/rloom/KEY/     NAME.records and NAME.offsets for each kind of records, about.json

The key is a hash of all that the content depends on: the bytes of the data files, columns, tokenizer, chat template.
RLOOM_CACHE is another folder. A folder is complete when it has its final name; its files are compared with the hashes
in about.json when it is opened, and what is damaged or not rloom's is replaced.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from rloom.errors import DataError
from rloom.hashed_files import file_sha256, hashed_file, read_report

VARIABLE = "RLOOM_CACHE"
FORMAT = 1  # a part of every key: raise it when other rows are valid, or when what is written changes
OWN_NAME = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.[0-9a-f]{16}")  # of a key's folder, and of its draft
ABOUT, RECORDS, OFFSETS = "about.json", ".records", ".offsets"
LIMIT_BYTES = 50e9  # the folders that were used last are kept
ABANDONED_S = 24 * 3600  # an unfinished folder of that age is not being written any more


class Records:
    """Byte strings in one file. Threads may read together, also after the folder was removed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.offsets = array("q", (folder / f"{name}{OFFSETS}").read_bytes())
        self.file = os.open(folder / f"{name}{RECORDS}", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.file)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> bytes:
        start = self.offsets[number]
        return os.pread(self.file, self.offsets[number + 1] - start, start)


@dataclass(frozen=True)
class CachedFolder:
    """The content of a complete folder."""

    facts: Mapping[str, Any]
    records: Mapping[str, Records]


Write = Callable[["Draft"], Mapping[str, Any]]  # writes the records; returns the facts, as JSON


class Draft:
    """A folder that is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, names: tuple[str, ...], rows: Iterable[tuple[bytes, ...]]) -> None:
        """A record of each name for every row."""
        offsets = [array("q", [0]) for _ in names]
        with ExitStack() as stack:
            files = [stack.enter_context(hashed_file(self.folder / f"{name}{RECORDS}")) for name in names]
            for row in rows:
                for file, own, record in zip(files, offsets, row, strict=True):
                    file.write(record)
                    own.append(file.size)
        for name, own in zip(names, offsets, strict=True):
            with hashed_file(self.folder / f"{name}{OFFSETS}") as file:
                file.write(own.tobytes())

    def complete(self, facts: Mapping[str, Any]) -> None:
        files = {file.name: read_report(file) for file in self.folder.iterdir() if file.suffix in (RECORDS, OFFSETS)}
        (self.folder / ABOUT).write_text(json.dumps({"facts": facts, "files": files}))


def key_of(*parts: Any) -> str:
    """The name of a folder: a hash of everything that its content depends on, given as JSON values."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], sort_keys=True).encode()).hexdigest()


def cache_folder() -> Path:
    own = os.environ.get(VARIABLE)
    return (
        Path(own).expanduser() if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rloom"
    )


def stored(key: str | None, write: Write) -> CachedFolder:
    """The content of this key, which is written if there is none. None: it is not kept."""
    final = None if key is None else cache_folder() / key
    found = None if final is None else opened(final)
    if found is not None:
        return found
    draft = new_folder(final)
    try:
        own = Draft(draft)
        own.complete(write(own))
        found = opened(draft, checks=False)
        assert found is not None  # it was just written
        if final is not None and draft.parent == final.parent:
            publish(draft, final)
            remove_oldest(keep=final)
    except OSError as error:
        raise DataError(
            f"{draft.parent} cannot be written ({error}): it keeps rows and tokens of the data; make room, or set "
            f"{VARIABLE} to a folder on another disk"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return found


def opened(folder: Path, *, checks: bool = True) -> CachedFolder | None:
    """None: it does not exist, or is damaged."""
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        names, facts = [Path(name) for name in about["files"]], about["facts"]
        for name, report in about["files"].items():
            if checks and file_sha256(folder / name) != report["sha256"]:
                return None
        if checks:
            with suppress(OSError):  # of another user, or on a disk that is mounted read-only
                os.utime(folder)  # it was used now
        return CachedFolder(facts, {name.stem: Records(folder, name.stem) for name in names if name.suffix == RECORDS})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def new_folder(final: Path | None) -> Path:
    """A new folder in the cache; in the folder for temporary files where the cache cannot be written."""
    if final is not None:
        with suppress(OSError):
            final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = final.with_name(f".{final.name}.{token_hex(8)}")
            draft.mkdir()
            return draft
    return Path(tempfile.mkdtemp(prefix="rloom-data-"))


def publish(draft: Path, final: Path) -> None:
    with suppress(OSError):  # another run was faster; or what is there is damaged
        draft.rename(final)
        return
    if opened(final) is None:
        remove(final)
        with suppress(OSError):
            draft.rename(final)


def remove_oldest(keep: Path) -> None:
    """Folders that were not used for the longest time, and drafts of processes that were killed. RLOOM_CACHE may name a
    folder with other files, which stay."""
    with suppress(OSError):
        own = [path for path in keep.parent.iterdir() if OWN_NAME.fullmatch(path.name) and path != keep]
        ages = sorted((path.lstat().st_mtime, path) for path in own)
        room = LIMIT_BYTES - folder_bytes(keep)
        for used, path in reversed(ages):
            if path.name.startswith("."):
                if time.time() - used > ABANDONED_S:
                    remove(path)
                continue
            room -= folder_bytes(path)
            if room < 0:
                remove(path)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
