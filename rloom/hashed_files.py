"""Files that are hashed while they are written. A report beside each says that it is complete, with its size and hash.

Whoever seals a checkpoint reads the reports instead of the files: reading 100 GB again takes minutes.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Any

from rloom.atomic import sync

WRITTEN = ".written"  # suffix of a report
CHUNK = 1 << 22  # bytes: what was hashed is still in the processor's cache when it is written


class HashedFile:
    """An open file, and the size and hash of what was written to it."""

    def __init__(self, stream: BufferedWriter) -> None:
        self.stream, self.sha256, self.size = stream, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            self.sha256.update(part)
            self.stream.write(part)
        self.size += len(view)


@contextmanager
def hashed_file(file: Path) -> Iterator[HashedFile]:
    """A file that is synced and reported when the block ends. The report is last: what it names is on the disk."""
    report_of(file).unlink(missing_ok=True)
    with file.open("wb") as stream:
        opened = HashedFile(stream)
        yield opened
        stream.flush()
        os.fsync(stream.fileno())
    sync(file.parent)
    report = report_of(file)
    begun = report.with_name(f"{report.name}.tmp")  # not synced: after a crash nobody reads it
    begun.write_text(json.dumps({"bytes": opened.size, "sha256": opened.sha256.hexdigest()}))
    begun.replace(report)


def report_of(file: Path) -> Path:
    return file.with_name(f"{file.name}{WRITTEN}")


def read_report(file: Path) -> dict[str, Any] | None:
    """None: the file is not complete, or its writer does not report."""
    try:
        found: dict[str, Any] = json.loads(report_of(file).read_text())
    except FileNotFoundError:
        return None
    return found


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
