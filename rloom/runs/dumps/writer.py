"""Writes dumps beside the training loop: a thread packs, compresses and writes while the next step is generated."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, pairwise
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rloom.runs.dumps.episodes import episode_text, prompt_tokens
from rloom.runs.dumps.index import (
    EPISODE_SCHEMA,
    INDEX,
    SCHEMA,
    TOKEN_COLUMNS,
    TOKENIZER,
    VERSIONS,
    Index,
    Kind,
    file_name,
    index_line,
    places_to_remove,
)
from rloom.runs.dumps.limits import DUMPS_TO_KEEP, tokens_of_a_step
from rloom.runs.records import to_json_value

if TYPE_CHECKING:  # they import torch, which readers of a dump do not need
    from torch import Tensor

    from rloom.batch import Batch, TokenRecord, TrainBatch, Trajectory


LARGEST = float(np.finfo(np.float16).max)


def validation_table(trajectories: "Sequence[Trajectory]") -> pa.Table:
    from rloom.batch import Batch

    batch = Batch.pack(trajectories)
    return _table(trajectories, batch, {"logprobs": batch.rollout_logprobs_T})


def training_table(trajectories: "Sequence[Trajectory]", batch: "TrainBatch", record: "TokenRecord | None") -> pa.Table:
    """`batch`: packed of the trajectories. `record`: None in a step that does not update the policy."""
    values_T = {"logprobs": batch.rollout_logprobs_T, "advantages": batch.advantages_T}
    if record is not None:
        values_T["entropy"] = record.entropy_T
        values_T["ratio"] = record.ratio_T
    return _table(trajectories, batch, values_T)


def _table(trajectories: "Sequence[Trajectory]", batch: "Batch", values_T: "dict[str, Tensor]") -> pa.Table:
    from rloom.batch import token_ends

    prompts = [prompt_tokens(t) for t in trajectories]
    ends = token_ends(batch.length_N)
    # of each sample, the tokens after the prompt
    kept = [slice(start + before, stop) for (start, stop), before in zip(pairwise(ends), prompts, strict=True)]
    offsets = np.cumsum([0, *(rows.stop - rows.start for rows in kept)]).astype(np.int32)
    columns: dict[str, Any] = {
        **_answer_columns(trajectories),
        "tokens": _lists(offsets, [batch.tokens_T[part].int() for part in kept]),
        **{name: _lists(offsets, [_half(value_T[part]) for part in kept]) for name, value_T in values_T.items()},
    }
    schema = SCHEMA
    if any(t.episode is not None for t in trajectories):
        schema = EPISODE_SCHEMA
        columns["branch"] = pa.array([t.branch for t in trajectories], pa.int32())
        calls = [0 if t.episode is None else len(t.episode.calls) for t in trajectories]
        columns["calls"] = pa.array(calls, pa.int32())
        columns["episode"] = _array([episode_text(t) for t in trajectories], pa.string())
    if any(turn.earlier for t in trajectories for turn in t.turns):
        schema = schema.append(VERSIONS)
        columns[VERSIONS.name] = _array([_versions(t) for t in trajectories], VERSIONS.type)
    empty = {field.name: pa.nulls(len(trajectories), field.type) for field in schema if field.name not in columns}
    return pa.table({**columns, **empty}, schema=schema)


def _answer_columns(trajectories: "Sequence[Trajectory]") -> dict[str, pa.Array]:
    found: dict[str, list[Any]] = {
        "group": [t.group for t in trajectories],
        "index": [t.prompt.index for t in trajectories],
        "data_source": [t.prompt.data_source for t in trajectories],
        "prompt": [t.prompt.text for t in trajectories],
        "ground_truth": [_text(t.prompt.ground_truth) for t in trajectories],
        "output": [t.text for t in trajectories],
        "score": [t.score.value for t in trajectories],
        "accuracy": [t.score.accuracy for t in trajectories],
        "parts": [_text(t.score.parts) if t.score.parts else None for t in trajectories],
        "prediction": [t.score.prediction for t in trajectories],
        "reason": [t.score.reason for t in trajectories],
        "detail": [t.score.detail for t in trajectories],
        "finished": [t.finished for t in trajectories],
        "version": [min((turn.oldest for turn in t.turns), default=0) for t in trajectories],
        "length": [sum(turn.stop - turn.start for turn in t.turns) for t in trajectories],
        "turns": [[end - prompt_tokens(t) for x in t.turns for end in (x.start, x.stop)] for t in trajectories],
    }
    return {name: _array(values, SCHEMA.field(name).type) for name, values in found.items()}


def _versions(trajectory: "Trajectory") -> list[int]:
    first = prompt_tokens(trajectory)
    runs = [run for turn in trajectory.turns for run in turn.runs]
    return [number for run in runs for number in (run.stop - first, run.version)]


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON files may hold
        return pa.array([None if v is None else v.encode("utf-8", "replace").decode() for v in values], kind)


def _lists(offsets: NDArray[np.int32], parts: "Sequence[Tensor]") -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([part.numpy() for part in parts])))


def _half(values: "Tensor") -> "Tensor":
    return values.clamp(-LARGEST, LARGEST).half()


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(to_json_value(value), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class DumpSample:
    """The answers of a step that are dumped: all of some groups."""

    rows: list[int]  # ascending
    groups: int
    groups_of_step: int

    @property
    def message(self) -> str:
        return (
            f"Answers to {self.groups} of the {self.groups_of_step} prompts of this step are written to rollouts/, "
            f"drawn at random: the folder has room for {DUMPS_TO_KEEP} such steps. trainer.log_rollouts_gb sets it"
        )


def sampled_groups(trajectories: "Sequence[Trajectory]", tokens: float, scope: str) -> DumpSample | None:
    """Groups in an order drawn by `scope`, until the next would exceed so many tokens; one at least. None: all fit."""
    tokens_of: Counter[int] = Counter()
    for trajectory in trajectories:
        tokens_of[trajectory.group] += len(trajectory.tokens_L) - prompt_tokens(trajectory)
    if tokens_of.total() <= tokens:
        return None
    order = sorted(tokens_of, key=lambda group: blake2b(f"{scope}/{group}".encode(), digest_size=8).digest())
    totals = accumulate(tokens_of[group] for group in order)
    chosen = {group for group, total in zip(order, totals, strict=True) if total <= tokens or group == order[0]}
    rows = [row for row, trajectory in enumerate(trajectories) if trajectory.group in chosen]
    return DumpSample(rows, len(chosen), len(tokens_of))


WAITING = 2  # dumps in memory; if the disk is slower than that, the loop waits
ROWS_TOGETHER = 64  # are compressed together: a reader of one prompt decompresses no more


def file_format(schema: pa.Schema) -> dict[str, Any]:
    """Arguments for pyarrow. Numbers of tokens are nearly all different: a dictionary of them and their statistics cost
    more than the compression, which finds the most if the first bytes of all are beside each other."""
    leaves = {one.name: f"{one.name}.list.element" if pa.types.is_list(one.type) else one.name for one in schema}
    others = [leaf for name, leaf in leaves.items() if name not in TOKEN_COLUMNS]
    return {
        **{"compression": "zstd", "compression_level": 1},
        "write_page_checksum": True,  # without, a damaged page can be read as other numbers
        **{"use_dictionary": others, "write_statistics": others},
        "use_byte_stream_split": [leaf for name, leaf in leaves.items() if name in TOKEN_COLUMNS],
    }


class DumpWriter:
    """Example:

    writer = DumpWriter(run_dir / "rollouts", limit=2 * 1024**3, seed=1, report=print)
    writer.write("train", 1, partial(training_table, trajectories, batch, record))
    writer.close()  # waits until everything is written
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: float,  # bytes of all dumps together
        seed: int,  # of the groups that are dumped of a large step
        report: Callable[[str], None],  # told about a dump that cannot be written: the run goes on without it
        save_tokenizer: Callable[[Path], None] | None = None,
    ) -> None:
        self._folder, self._limit, self._seed, self._report = folder, limit, seed, report
        self._save_tokenizer = save_tokenizer
        self._index: Index | None = None  # read by the thread
        self._has_failed = False
        self._jobs: Queue[Callable[[], None] | None] = Queue(WAITING)
        self._thread: threading.Thread | None = None

    def sample(self, kind: Kind, step: int, trajectories: "Sequence[Trajectory]") -> DumpSample | None:
        """The answers to dump. None: all, as most steps are small."""
        scope = f"{self._seed}/{kind}" if kind == "validation" else f"{self._seed}/{kind}/{step}"
        return sampled_groups(trajectories, tokens_of_a_step(self._limit), scope)

    def write(
        self, kind: Kind, step: int, make_table: Callable[[], pa.Table], groups_of_step: int | None = None
    ) -> None:
        """Returns before the table is made. It replaces an earlier dump of the step."""
        self._start(lambda: self._write(kind, step, make_table(), groups_of_step))

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
            except Exception as error:  # any error: a dump that fails does not end the run
                if not self._has_failed:
                    self._has_failed = True
                    self._report_failure(f"{type(error).__name__}: {error}")

    def _report_failure(self, reason: str) -> None:
        with suppress(Exception):  # a full disk takes no report either, and this thread must not end
            self._report(f"Answers cannot be written to {self._folder} ({reason}); the run goes on without them")

    @property
    def index(self) -> Index:
        """The index of the folder, which is made with the first dump."""
        if self._index is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._index = Index(self._folder)
            if self._save_tokenizer is not None:
                self._save_tokenizer(self._folder / TOKENIZER)
        return self._index

    def _write(self, kind: Kind, step: int, table: pa.Table, groups_of_step: int | None) -> None:
        index, file = self.index, self._folder / file_name(kind, step)
        file.parent.mkdir(exist_ok=True)
        draft = file.with_suffix(".writing")
        try:
            pq.write_table(table, draft, row_group_size=ROWS_TOGETHER, **file_format(table.schema))
            size = draft.stat().st_size
            draft.replace(file)  # a reader sees a whole file or none
        finally:
            draft.unlink(missing_ok=True)
        self._append(index_line(kind, step, table, size, groups_of_step))
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
