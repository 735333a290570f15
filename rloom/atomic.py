"""Writing so that a crash at any instant leaves the old file or the new one, never half of either."""

import os
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Written beside, synced, renamed."""
    beside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    beside.replace(file)
    sync(file.parent)


def sync(path: Path) -> None:
    """See a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
