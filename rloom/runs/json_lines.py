"""Files of a run, which another process may be writing, or another person may have written."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from rloom.errors import DataError

Record = TypeVar("Record")
LONGEST_LINE = 1 << 24  # bytes; a longer one is passed over, so that it is never in memory


def open_regular(file: Path) -> BinaryIO:
    """For reading. A FIFO would block for ever, and a link may lead to any file of the user: both are DataErrors."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{file.name} is a symbolic link; rloom writes none, and follows none in a run") from error
        raise DataError(f"{file.name} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{file} is not a regular file")
    return os.fdopen(handle, "rb")


class Appended(NamedTuple, Generic[Record]):
    records: list[Record]
    replaced: bool  # the file is another one, or shorter than before: `records` are all of its records


class JsonLines(Generic[Record]):
    """Each `read` returns the records that were completed since the last one.

    A line that is still being written is read when it is complete. `check` returns the record of a row, or None if a
    field is missing or has another type; such a line is skipped, and so is one that is not JSON or was cut short.
    """

    def __init__(self, file: Path, check: Callable[[dict[str, Any]], Record | None]) -> None:
        self._file, self._check = file, check
        self._restart(None)

    def _restart(self, inode: int | None) -> None:
        self._inode = inode
        self._position = 0  # after the last complete line
        self._in_long_line = False
        self.skipped = 0  # lines

    def read(self) -> Appended[Record]:
        try:
            lines = open_regular(self._file)
        except FileNotFoundError:
            replaced = self._inode is not None
            self._restart(None)
            return Appended([], replaced)
        with lines:
            status = os.fstat(lines.fileno())
            replaced = self._inode is not None and (status.st_ino != self._inode or status.st_size < self._position)
            if replaced or self._inode is None:
                self._restart(status.st_ino)
            lines.seek(self._position)
            return Appended(self._records(lines), replaced)

    def _records(self, lines: BinaryIO) -> list[Record]:
        found = []
        while part := lines.readline(LONGEST_LINE):
            ends = part.endswith(b"\n")
            if not ends and len(part) < LONGEST_LINE:  # still being written
                break
            self._position += len(part)
            is_long, self._in_long_line = self._in_long_line or not ends, not ends
            row = None if is_long else parse_row(part)
            record = None if row is None else self._check(row)
            if record is not None:
                found.append(record)
            elif ends and part.strip():
                self.skipped += 1
        return found


def parse_row(line: bytes) -> dict[str, Any] | None:
    """None: cut short by a crash, being written, not UTF-8, nested too deeply, or not an object."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
