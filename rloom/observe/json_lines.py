"""Following a file of JSON lines that another process appends to."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple


class Appended(NamedTuple):
    rows: list[dict[str, Any]]
    replaced: bool  # the file is another one, or shorter than before: `rows` are all of its rows


class JsonLines:
    """Each `read` returns the rows that were completed since the last one.

    A line that is still being written is read when it is complete; one that a crash cut short is passed over.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position = 0  # after the last complete line
        self._inode: int | None = None

    def read(self) -> Appended:
        try:
            with self._file.open("rb") as lines:
                status = os.fstat(lines.fileno())
                replaced = self._inode is not None and (status.st_ino != self._inode or status.st_size < self._position)
                if replaced:
                    self._position = 0
                self._inode = status.st_ino
                lines.seek(self._position)
                complete, newline, _ = lines.read().rpartition(b"\n")
        except FileNotFoundError:
            replaced = self._inode is not None
            self._position, self._inode = 0, None
            return Appended([], replaced)
        self._position += len(complete) + len(newline)
        return Appended(list(filter(None, map(parse_row, complete.split(b"\n")))), replaced)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """None: cut short by a crash, being written, or not UTF-8."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
