"""Reads the dumps of a run, one step at a time, also while the run writes them. Imports no torch."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rloom.errors import DataError
from rloom.runs.dumps.episodes import read_episode
from rloom.runs.dumps.index import (
    EPISODE_SCHEMA,
    FOLDER,
    KINDS,
    SCHEMA,
    SCHEMAS,
    TOKEN_COLUMNS,
    TOKENIZER,
    VERSIONS,
    Index,
    Kind,
    file_name,
    first_branches,
)
from rloom.runs.records import Check, finite, is_number, is_whole, open_regular, or_none, parse_row


class TokenTexts:
    def __init__(self, tokenizer: Path) -> None:
        self._file = tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer  # without transformers: it imports in milliseconds

        with open_regular(self._file) as file:
            return Tokenizer.from_buffer(file.read())

    def split(self, tokens: Sequence[int]) -> list[str] | None:
        """One text for each token. A character that several tokens make up is the text of the last of them.

        None: the run's tokenizer has no such file, or it cannot be read.
        """
        from tokenizers.decoders import DecodeStream

        try:
            stream = DecodeStream(skip_special_tokens=False)
            return [stream.step(self._tokenizer, token) or "" for token in tokens]
        except BaseException:  # the library raises plain Exceptions; its panics are not even Exceptions
            return None


LARGEST_DUMP = 1 << 32  # bytes, not compressed
MOST_ROWS = 1 << 17  # repeated rows take no space in the file, but much in memory
SUMMARY_COLUMNS = ["group", "index", "data_source", "prompt", "ground_truth", "score", "accuracy", "length"]
SEARCH_COLUMNS = ["group", "data_source", "prompt", "output", "score", "length"]
ANSWER_COLUMNS = [*SUMMARY_COLUMNS, "output", "prediction", "finished"]
# shown as they are dumped
SAME_COLUMNS = ["score", "accuracy", "parts", "reason", "detail", "prediction", "finished", "version", "length"]
EPISODE_COLUMNS = [name for name in EPISODE_SCHEMA.names if name not in SCHEMA.names]


@dataclass(frozen=True)
class PromptSummary:
    """A prompt of a step. Scores are over the answers whose score did not fail."""

    group: int
    index: int  # row in the data set
    data_source: str
    text: str
    ground_truth: str | None
    answers: int
    mean: float | None
    best: float | None
    worst: float | None
    spread: float | None  # standard deviation, 0 for a single answer
    accuracy: float | None  # mean
    failed: int
    length: float  # mean, tokens


@dataclass(frozen=True)
class TokenText:
    text: str
    masked: bool  # a token of the environment, such as a tool's output


@dataclass(frozen=True)
class DumpedAnswer:
    text: str
    pieces: list[TokenText] | None  # None: the tokens cannot be turned into text
    logprobs: list[float | None] | None
    advantages: list[float | None] | None
    entropy: list[float | None] | None
    ratio: list[float | None] | None
    score: float | None
    accuracy: float | None
    parts: dict[str, float]
    reason: str | None
    detail: str | None
    prediction: str | None
    finished: bool
    version: int  # the oldest of several
    versions: list[tuple[int, int]] | None  # (stop, version) of runs of tokens. None: the dump has no such column
    turns: list[tuple[int, int]]
    length: int
    episode: dict[str, Any] | None  # as episodes.py has it, iff several turns
    branch: int


@dataclass(frozen=True)
class FoundAnswer:
    """An answer that contains a text, or whose prompt does."""

    group: int
    number: int  # its place among the answers of the group, from 1
    data_source: str
    prompt: str
    text: str
    score: float | None
    length: int


@dataclass(frozen=True)
class PromptAtStep:
    step: int
    group: int
    answers: int
    mean: float | None


class Dumps:
    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._index = Index(self._folder)
        self._texts = TokenTexts(self._folder / TOKENIZER)

    def refresh(self) -> bool:
        """Whether there was anything new."""
        return self._index.refresh()

    @property
    def skipped(self) -> int:
        """Lines of the index that do not fit."""
        return self._index.skipped

    def steps(self, kind: Kind) -> list[int]:
        return self._index.steps(kind)

    def groups_of_step(self, kind: Kind, step: int) -> int | None:
        """Groups of which those of the dump were drawn. None: it has all of them."""
        return self._index.entries[kind, step].groups_of_step

    def prompts(self, kind: Kind, step: int) -> list[PromptSummary]:
        """In the order of their groups."""
        return [_summary(group) for group in self._groups(kind, step, SUMMARY_COLUMNS).values()]

    def rows(self, kind: Kind, step: int) -> list[dict[str, Any]]:
        """Its answers, as they are dumped, without their tokens; `calls` only if they have several turns."""
        return self._rows(kind, step, [*ANSWER_COLUMNS, "detail", "calls"])

    def texts(self, kind: Kind, step: int) -> dict[int, list[str]]:
        """The answers of each group, to search in."""
        groups = self._groups(kind, step, ["group", "output"])
        return {group: [row["output"] for row in rows] for group, rows in groups.items()}

    def first_answers(self, kind: Kind, step: int) -> dict[int, tuple[str, float | None]]:
        """Text and score of the first answer of each group."""
        groups = self._groups(kind, step, ["group", "output", "score"])
        return {group: (rows[0]["output"], rows[0]["score"]) for group, rows in groups.items()}

    def answers_with(self, kind: Kind, step: int, text: str, most: int) -> tuple[int, list[FoundAnswer]]:
        """How many contain the text, in any case, and the first `most` of them, in the order of the dump."""
        table = self._table(kind, step, SEARCH_COLUMNS)
        # the text is no pattern: the search takes time in proportion to the answers, whatever is searched for
        try:
            place_F = np.flatnonzero(pc.match_substring(table["output"], text, ignore_case=True).to_numpy())
        except pa.ArrowException as error:
            raise DataError(f"the dump of {kind} step {step} cannot be read: {error}") from error
        group_N, shown = table["group"].to_numpy(), place_F[:most]
        found = []
        for place, row in zip(shown, self._checked(kind, step, table.take(shown)), strict=True):
            number = int((group_N[: place + 1] == row["group"]).sum())
            texts = {"data_source": row["data_source"], "prompt": row["prompt"], "text": row["output"]}
            found.append(FoundAnswer(row["group"], number, **texts, score=row["score"], length=row["length"]))
        return len(place_F), found

    def quantiles(self, kind: Kind, step: int, count: int) -> Mapping[str, list[float] | None]:
        """Of the scores that did not fail and of the lengths: lowest, at equal shares, highest. None: no value."""
        table = self._table(kind, step, ["score", "length"])
        return {name: _quantiles(table[name].to_numpy().astype(np.float64), count) for name in ("score", "length")}

    def answers(self, kind: Kind, step: int, group: int) -> list[DumpedAnswer]:
        """Of all branches. Empty if the step has no such group."""
        return [self._answer(row) for row in self._rows(kind, step, SCHEMA.names, group)]

    def history(self, kind: Kind, index: int) -> list[PromptAtStep]:
        """The steps whose dump has the prompt, from the index alone."""
        return [
            PromptAtStep(step, entry.groups[place], entry.answers[place], entry.means[place])
            for step in self.steps(kind)
            for entry in [self._index.entries[kind, step]]
            for place, prompt in enumerate(entry.prompts)
            if prompt == index
        ]

    def _rows(self, kind: Kind, step: int, columns: Sequence[str], group: int | None = None) -> list[dict[str, Any]]:
        """Those columns of all rows, or of the rows of one group, checked."""
        return self._checked(kind, step, self._table(kind, step, columns, group))

    def _groups(self, kind: Kind, step: int, columns: Sequence[str]) -> dict[int, list[dict[str, Any]]]:
        """Those columns of all rows, by group."""
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in self._rows(kind, step, columns):
            groups.setdefault(row["group"], []).append(row)
        return groups

    def _table(self, kind: Kind, step: int, columns: Sequence[str], group: int | None = None) -> pa.Table:
        if kind not in KINDS or (kind, step) not in self._index.entries:
            raise DataError(f"there is no dump of {kind} step {step} in {self._folder}")
        try:
            with open_regular(self._folder / file_name(kind, step)) as source:
                return read_table(source, columns, group)
        except (OSError, pa.ArrowException, DataError) as error:
            raise DataError(f"the dump of {kind} step {step} cannot be read: {error}") from error

    def _checked(self, kind: Kind, step: int, table: pa.Table) -> list[dict[str, Any]]:
        try:
            rows: list[dict[str, Any]] = table.to_pylist()
            for number, row in enumerate(rows):
                check_row(number, row)
        except (pa.ArrowException, UnicodeDecodeError, DataError) as error:
            raise DataError(f"the dump of {kind} step {step} cannot be read: {error}") from error
        return rows

    def _answer(self, row: dict[str, Any]) -> DumpedAnswer:
        turns = pairs(row["turns"])  # checked: pairs, within the tokens
        texts = self._texts.split(row["tokens"])
        own = {place for start, stop in turns for place in range(start, stop)}
        columns: dict[str, Any] = {name: row[name] for name in SAME_COLUMNS}
        columns |= {name: _numbers(row[name]) for name in TOKEN_COLUMNS}
        pieces = None if texts is None else [TokenText(text, place not in own) for place, text in enumerate(texts)]
        return DumpedAnswer(
            text=row["output"],
            pieces=pieces,
            **columns,
            versions=pairs(row[VERSIONS.name]) if VERSIONS.name in row else None,
            turns=turns,
            episode=row.get("episode"),
            branch=row.get("branch", 0),
        )


def read_table(source: Any, columns: Sequence[str], group: int | None) -> pa.Table:
    # not pq.read_table: it imports pandas, which takes longer than everything else
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        parts = (file.metadata.row_group(part) for part in range(file.num_row_groups))
        if sum(part.total_byte_size for part in parts) > LARGEST_DUMP:
            raise DataError(f"it has more than {LARGEST_DUMP:,} bytes")
        if file.metadata.num_rows > MOST_ROWS:
            raise DataError(f"it has {file.metadata.num_rows:,} rows; a step has at most {MOST_ROWS:,}")
        if not any(map(file.schema_arrow.equals, SCHEMAS)):
            raise DataError("it has other columns")
        if group is not None:
            return rows_of_group(file, group)
        if "branch" in file.schema_arrow.names:
            return first_branches(file.read([*columns, "branch"])).select(columns)
        return file.read([name for name in columns if name not in EPISODE_COLUMNS])


def check_row(number: int, row: dict[str, Any]) -> None:
    """Types are those of the schema. `parts` is read. DataError: a value that a run does not write."""
    for name, value in row.items():
        if not CHECKS[name](value):
            raise DataError(f"row {number} has no valid {name}")
    if "tokens" in row:
        ends, count = row["turns"], len(row["tokens"])
        if len(ends) % 2 or ends != sorted(ends) or any(not 0 <= end <= count for end in ends):
            raise DataError(f"row {number} has no valid turns")
        if VERSIONS.name in row and not are_runs(row[VERSIONS.name], ends):
            raise DataError(f"row {number} has no valid versions")
        if any(row[name] is not None and len(row[name]) != count for name in TOKEN_COLUMNS):
            raise DataError(f"row {number} has more tokens than numbers, or fewer")
        parts = parse_row(row["parts"].encode()) if row["parts"] else {}
        if parts is None or any(finite(value) is None for value in parts.values()):
            raise DataError(f"row {number} has no valid parts")
        row["parts"] = parts
        if row.get("episode") is not None:
            row["episode"] = read_episode(row["episode"], count)
            if row["episode"] is None:
                raise DataError(f"row {number} has no valid episode")


def are_runs(numbers: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether every generated token has a version: `ends` are the starts and stops of the turns."""
    stops, turn_stops = numbers[::2], ends[1::2]
    in_order = len(numbers) % 2 == 0 and stops == sorted(stops)
    return in_order and turn_stops == [stop for stop in stops if stop in turn_stops]


def pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _has_no_none(values: Sequence[Any] | None) -> bool:
    return values is not None and None not in values


CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("group", "index", "length", "branch", "calls"), is_whole),
    **dict.fromkeys(("data_source", "prompt", "output", "finished", "version"), lambda value: value is not None),
    **dict.fromkeys(("ground_truth", "parts", "prediction", "reason", "detail", "episode"), lambda value: True),
    **dict.fromkeys(("score", "accuracy"), or_none(is_number)),
    **dict.fromkeys(("turns", "tokens", VERSIONS.name), _has_no_none),
    **dict.fromkeys(TOKEN_COLUMNS, or_none(_has_no_none)),
}


def rows_of_group(file: pq.ParquetFile, group: int) -> pa.Table:
    """Decompresses only the parts of the file that have rows of the group."""
    found = [place for place, value in enumerate(file.read(["group"])["group"].to_pylist()) if value == group]
    tables, start = [], 0
    for part in range(file.num_row_groups):
        stop = start + file.metadata.row_group(part).num_rows
        inside = [place - start for place in found if start <= place < stop]
        if inside:
            rows = file.read_row_group(part)
            tables += [rows.slice(place, 1) for place in inside]
        start = stop
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


def _summary(rows: Sequence[dict[str, Any]]) -> PromptSummary:
    first, scores = rows[0], [row["score"] for row in rows if row["score"] is not None]
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return PromptSummary(
        group=first["group"],
        index=first["index"],
        data_source=first["data_source"],
        text=first["prompt"],
        ground_truth=first["ground_truth"],
        answers=len(rows),
        mean=statistics.fmean(scores) if scores else None,
        best=max(scores, default=None),
        worst=min(scores, default=None),
        spread=(statistics.stdev(scores) if len(scores) > 1 else 0.0) if scores else None,
        accuracy=statistics.fmean(accuracies) if accuracies else None,
        failed=len(rows) - len(scores),
        length=statistics.fmean(row["length"] for row in rows),
    )


def _quantiles(values: NDArray[np.float64], count: int) -> list[float] | None:
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return [float(f"{value:.5g}") for value in np.quantile(values, np.linspace(0, 1, count))]


def _numbers(values: Sequence[float] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [float(value) if math.isfinite(value) else None for value in values]
