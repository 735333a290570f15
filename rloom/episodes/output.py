"""What environments and agents print, as a part of the run's output."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator

from rloom.types import plain_text

OUTPUT_BYTES = 1 << 20  # that all processes of a run may print
LONGEST_LINE = 4096  # bytes that are shown at once; a longer line is continued in the next one
ERRORS_SHOWN = 20  # at different places
JOIN_S = 2.0  # until the last lines are read
log = logging.getLogger(__name__)


class Output:
    """Line by line, with a prefix and without control characters: a process may print what the policy wrote.

    The first MiB is shown, the rest counted.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.shown = self.dropped = 0
        self.places: set[str] = set()  # of errors that were shown
        self.readers: list[threading.Thread] = []

    @contextlib.contextmanager
    def written(self) -> Iterator[int]:
        """The descriptor to write to."""
        reading, writing = os.pipe()
        thread = threading.Thread(target=self.read, args=(reading,), name=f"{self.prefix}-output", daemon=True)
        thread.start()
        self.readers.append(thread)
        try:
            yield writing
        finally:
            os.close(writing)

    def read(self, descriptor: int) -> None:
        begun = b""  # a line whose end was not read yet
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            while data := file.read(1 << 20):
                *lines, begun = (begun + data).split(b"\n")
                if len(begun) > LONGEST_LINE:
                    lines, begun = [*lines, begun], b""
                self.show(lines)
        if begun:
            self.show([begun])

    def show(self, lines: list[bytes]) -> None:
        for line in lines:
            if not self.dropped and self.shown + len(line) <= OUTPUT_BYTES:
                self.shown += len(line) + 1
                self.write(line.decode(errors="replace"))
                continue
            if not self.dropped:
                log.warning("environments have printed %s bytes; more is counted, not shown", f"{OUTPUT_BYTES:,}")
            self.dropped += len(line) + 1

    def show_error(self, place: str, text: str) -> None:
        """Once for each place of an error."""
        if place not in self.places and len(self.places) < ERRORS_SHOWN:
            self.places.add(place)
            for line in text.rstrip().split("\n"):
                self.write(line)

    def write(self, line: str) -> None:
        text = plain_text(line.rstrip("\r").rpartition("\r")[2])  # of a progress bar, what it shows at the end
        with contextlib.suppress(OSError, ValueError):  # a closed output must not stop an environment
            sys.stderr.write(f"{self.prefix}: {text}\n")

    def close(self) -> None:
        for thread in self.readers:
            thread.join(JOIN_S)
        if self.dropped:
            log.warning("%s bytes that environments have printed are not shown", f"{self.dropped:,}")
