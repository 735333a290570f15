"""Atomic writes: after a crash at any time, the file is the old one or the new one."""

import os
import secrets
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write a temporary file in the same folder, sync it, rename it.

    Its name cannot be guessed, and it must be new: a link that others put there would lead to any file of the user.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(handle)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(file.parent)


def sync_all(folder: Path) -> None:
    """Flush all files of a folder and its subfolders, and their entries.

    The machine that wrote a file calls it: on a disk that machines share, another one has nothing of it to flush.
    """
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
