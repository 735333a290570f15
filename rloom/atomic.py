"""Atomic writes: after a crash at any time, the file is the old one or the new one."""

import os
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Write a temporary file in the same folder, sync it, rename it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(file)
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
