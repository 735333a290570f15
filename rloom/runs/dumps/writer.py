"""Writes dumps beside the training loop: a thread packs, compresses and writes while the next step is generated."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rloom.runs.dumps.index import Index, index_line, places_to_remove
from rloom.runs.dumps.layout import INDEX, TOKENIZER, Kind, file_name

WAITING = 2  # dumps in memory; if the disk is slower than that, the loop waits
ROWS_TOGETHER = 64  # are compressed together: a reader of one prompt decompresses no more
# without checksums, a damaged page can be read as other numbers
FORMAT: Mapping[str, Any] = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}


class DumpWriter:
    """Example:

    writer = DumpWriter(run_dir / "rollouts", limit=2 * 1024**3, report=print)
    writer.write("train", 1, partial(training_table, trajectories, batch, record))
    writer.close()  # waits until everything is written
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: float,  # bytes of all dumps together
        report: Callable[[str], None],  # of a dump that cannot be written: the run goes on without it
        save_tokenizer: Callable[[Path], None] | None = None,
    ) -> None:
        self._folder, self._limit, self._report = folder, limit, report
        self._save_tokenizer = save_tokenizer
        self._index: Index | None = None  # read by the thread
        self._has_failed = False
        self._jobs: Queue[Callable[[], None] | None] = Queue(WAITING)
        self._thread: threading.Thread | None = None

    def write(self, kind: Kind, step: int, make_table: Callable[[], pa.Table]) -> None:
        """Returns before the table is made. It replaces an earlier dump of the step."""
        self._start(lambda: self._write(kind, step, make_table()))

    def remove_after(self, step: int) -> None:
        """A run goes on from `step`: it will write later steps anew."""
        if (self._folder / INDEX).exists():
            self._start(lambda: self._remove_after(step))

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _start(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="write-dumps", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # of any kind: a dump that fails does not end the run
                if not self._has_failed:
                    self._has_failed = True
                    self._report_failure(f"{type(error).__name__}: {error}")

    def _report_failure(self, reason: str) -> None:
        with suppress(Exception):  # a full disk takes no report either, and this thread must not end
            self._report(f"Answers cannot be written to {self._folder} ({reason}); the run goes on without them")

    @property
    def index(self) -> Index:
        """Of the folder, which is made with the first dump."""
        if self._index is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._index = Index(self._folder)
            if self._save_tokenizer is not None:
                self._save_tokenizer(self._folder / TOKENIZER)
        return self._index

    def _write(self, kind: Kind, step: int, table: pa.Table) -> None:
        index, file = self.index, self._folder / file_name(kind, step)
        file.parent.mkdir(exist_ok=True)
        draft = file.with_suffix(".writing")
        try:
            pq.write_table(table, draft, row_group_size=ROWS_TOGETHER, **FORMAT)
            size = draft.stat().st_size
            draft.replace(file)  # a reader sees a whole file or none
        finally:
            draft.unlink(missing_ok=True)
        self._append(index_line(kind, step, table, size))
        for place in places_to_remove(index.entries, self._limit):
            self._append(f'{{"kind":"{place[0]}","step":{place[1]},"removed":true}}\n')
            (self._folder / file_name(*place)).unlink(missing_ok=True)

    def _remove_after(self, step: int) -> None:
        later = [place for place in self.index.entries if place[1] > step]
        self._append(f'{{"after":{step}}}\n')
        for place in later:
            (self._folder / file_name(*place)).unlink(missing_ok=True)

    def _append(self, line: str) -> None:
        file = self._folder / INDEX
        with file.open("ab") as out:
            if out.tell() and not _ends_in_a_line(file):  # a crash may have cut the last line short
                out.write(b"\n")
            out.write(line.encode())
        self.index.refresh()


def _ends_in_a_line(file: Path) -> bool:
    with file.open("rb") as lines:
        lines.seek(-1, 2)
        return lines.read(1) == b"\n"
