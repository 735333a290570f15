"""From data files to prompts: read and check rows, which needs no torch; then render and tokenize them, and apply the
maximum prompt length."""

import json
import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from rloom.data.cache import CachedFolder, Draft, Records, key_of, stored
from rloom.data.chat import Tokenizer, render_chat, tokenize
from rloom.data.files import Row, content_of, iter_rows
from rloom.data.rows import Columns, ReadRow, RowsDigest, read_row
from rloom.errors import ConfigError, DataError
from rloom.types import Prompt

log = logging.getLogger(__name__)

Truncation = Literal["error", "left", "right", "middle"]
Tokens = tuple[int, ...]

ROWS_PER_CHUNK = 256  # tokenized in one call, which a fast tokenizer runs on several cores


@dataclass(frozen=True)
class PlacedRow:
    index: int  # in the whole data set
    place: str  # key, file and row number, for error messages
    values: Row


@dataclass(frozen=True)
class GivenRows:
    """Rows in memory, in place of a file."""

    name: str  # the argument that gave them, for error messages
    rows: Sequence[Row]


@dataclass(frozen=True)
class PromptRow:
    """A row without fault."""

    placed: PlacedRow
    read: ReadRow


class PromptRows(Sequence[PromptRow]):
    """Checked rows of all files in order, each made when it is read."""

    def __init__(
        self,
        values: Sequence[Row],
        columns: Columns,
        sources: Sequence[tuple[str, int]],  # key and file, for error messages, and the number of its rows
        content: str,  # digest of the rows as they are in the files
        key: str | None,  # of the cache; None: they are not in it
    ) -> None:
        self.values, self.columns, self.sources = values, columns, sources
        self.content, self.key = content, key

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, number: int) -> PromptRow: ...
    @overload
    def __getitem__(self, number: slice) -> list[PromptRow]: ...

    def __getitem__(self, number: int | slice) -> PromptRow | list[PromptRow]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        values = self.values[number]
        return PromptRow(PlacedRow(number, self.place(number), values), read_row(values, self.columns))

    def place(self, number: int) -> str:
        for source, rows in self.sources:
            if number < rows:
                return _place(source, number)
            number -= rows
        raise IndexError(number)


class StoredRows(Sequence[Row]):
    """Rows in the cache."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]  # slices are made by PromptRows
        row: Row = json.loads(self.records[number])
        return row


class NotJson(Exception):
    """JSON cannot hold the values of a row exactly: dates, bytes."""


def read_prompt_rows(
    files: str | Path | Sequence[str | Path] | GivenRows,
    columns: Columns,
    *,
    max_samples: int | None,
    field: str = "data.train_files",
) -> PromptRows:
    """The rows of all files in order, checked. `max_samples` (None, -1: all) selects the first rows."""
    at_most = _row_limit(max_samples, field)
    if isinstance(files, GivenRows):
        found = _Checking(columns)
        rows = [found.checked(_place(files.name, number), row) for number, row in enumerate(files.rows[:at_most])]
        return PromptRows(rows, columns, [(files.name, len(rows))], found.content, None)
    paths = _paths(files, field)
    try:
        hashes = [_content_of(path, field) for path in paths]
        key = key_of("rows", hashes, asdict(columns), at_most)
        kept = stored(key, partial(_write_rows, paths, hashes, columns, field, at_most))
        sources = [(f"{field}: {path}", rows) for path, rows in zip(paths, kept.facts["rows"], strict=False)]
        return PromptRows(StoredRows(kept.records["rows"]), columns, sources, kept.facts["content"], key)
    except NotJson:
        found, counts = _Checking(columns), list[int]()
        rows = list(_checked_rows(found, paths, field, at_most, counts))
        sources = [(f"{field}: {path}", number) for path, number in zip(paths, counts, strict=False)]
        return PromptRows(rows, columns, sources, found.content, None)


def _write_rows(
    paths: Sequence[str | Path],
    hashes: Sequence[list[Any]],
    columns: Columns,
    field: str,
    at_most: int | None,
    draft: Draft,
) -> dict[str, Any]:
    found, counts = _Checking(columns), list[int]()
    draft.write(("rows",), ((_exact_json(row),) for row in _checked_rows(found, paths, field, at_most, counts)))
    for path, content in zip(paths, hashes, strict=True):
        if _content_of(path, field) != content:  # its rows would be found under the key of its former content
            raise DataError(f"{field}: {path} was changed while it was read; start again when it is complete")
    return {"content": found.content, "rows": counts}


def _exact_json(row: Row) -> bytes:
    try:
        text = json.dumps(row)
    except (TypeError, ValueError) as error:
        raise NotJson from error
    if repr(json.loads(text)) != repr(row):
        raise NotJson
    return text.encode()


def _checked_rows(
    found: "_Checking", paths: Sequence[str | Path], field: str, at_most: int | None, counts: list[int]
) -> Iterator[Row]:
    """`counts` gets the rows of each file."""
    for path in paths:
        counts.append(0)
        rows = enumerate(_rows_of(path, field, at_most))
        for number, row in rows:
            if sum(counts) == at_most:
                return
            counts[-1] += 1
            try:
                yield found.checked(_place(f"{field}: {path}", number), row)
            except DataError:
                for _ in rows:  # a file that cannot be read to its end is the greater fault
                    pass
                raise


class _Checking:
    """Checks rows, and computes the digest of what they hold."""

    def __init__(self, columns: Columns) -> None:
        self.columns, self.digest = columns, RowsDigest()

    @property
    def content(self) -> str:
        return self.digest.sha256.hexdigest()

    def checked(self, place: str, values: Row) -> Row:
        read = read_row(values, self.columns)
        if read.faults:
            raise DataError(f"{place}: {read.faults[0].reason}")
        self.digest.add((read.messages, read.data_source, read.ground_truth))
        return values


class PromptTable(Sequence[Prompt]):
    """The prompts of rows, each made when it is read. Texts and tokens are in the cache, or in a temporary file."""

    def __init__(
        self,
        rows: PromptRows,
        kept: CachedFolder,
        key: str | None,
        numbers: NDArray[np.int64],  # of the rows
        *,
        prompt_key: str,
        return_raw_chat: bool,
        limit: int,
        truncate: Callable[[Tokens, int], Tokens],
    ) -> None:
        self.rows, self.key, self.numbers = rows, key, numbers
        self.texts, self.tokens = kept.records["texts"], kept.records["tokens"]
        self.source_names: list[str] = kept.facts["sources"]
        self.sources = np.frombuffer(kept.records["sources"][0], np.int32)
        self.different: int = kept.facts["different"]  # texts of all rows
        self.prompt_key, self.return_raw_chat = prompt_key, return_raw_chat
        self.limit, self.truncate = limit, truncate

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, number: int) -> Prompt: ...
    @overload
    def __getitem__(self, number: slice) -> list[Prompt]: ...

    def __getitem__(self, number: int | slice) -> Prompt | list[Prompt]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        index = int(self.numbers[number])
        row = self.rows[index]
        read, values = row.read, row.placed.values
        assert read.messages is not None and read.data_source is not None and read.extra_info is not None  # no faults
        tokens = tuple(np.frombuffer(self.tokens[index], np.int32).tolist())
        return Prompt(
            index=index,
            messages=read.messages,
            text=self.texts[index].decode(),
            tokens=self.truncate(tokens, self.limit),
            data_source=read.data_source,
            ground_truth=read.ground_truth,
            extra_info=read.extra_info | ({"raw_prompt": list(read.messages)} if self.return_raw_chat else {}),
            columns=values | {"prompt": values[self.prompt_key]},
        )

    def rows_by_source(self) -> dict[str, list[int]]:
        """Rows of each data source."""
        sources = self.sources[self.numbers]
        found = {name: self.numbers[sources == number].tolist() for number, name in enumerate(self.source_names)}
        return {name: rows for name, rows in found.items() if rows}

    def digest(self, compute: Callable[["PromptTable"], str]) -> str:
        """What `compute` finds, kept in the cache."""
        if self.key is None:
            return compute(self)
        key = key_of("digest", self.key, sha256(self.numbers.tobytes()).hexdigest(), compute.__qualname__)
        found: str = stored(key, lambda draft: {"digest": compute(self)}).facts["digest"]
        return found


def load_prompts(
    rows: PromptRows,
    *,
    tokenizer: Tokenizer,
    prompt_key: str,
    max_prompt_length: int,
    filter_overlong: bool,
    truncation: Truncation,
    num_workers: int,
    return_raw_chat: bool,
    field: str = "data.train_files",
) -> PromptTable:
    """`Prompt.index` counts rows before filtering. `Prompt.text` is not truncated."""
    tokenize([""], tokenizer)  # disables a truncation that is stored in tokenizer.json
    key = _prompts_key(rows, tokenizer)
    build = partial(_build, tokenizer=tokenizer)
    kept = stored(key, partial(_write_prompts, rows, build, num_workers))
    ends: NDArray[np.int64] = np.frombuffer(kept.records["tokens"].offsets, np.int64)
    lengths = (ends[1:] - ends[:-1]) // np.dtype(np.int32).itemsize
    numbers = np.arange(len(rows))
    if filter_overlong:
        numbers = _short_enough(lengths, max_prompt_length, field)
    elif truncation == "error":
        _refuse_overlong(lengths, rows, max_prompt_length)
    return PromptTable(
        rows,
        kept,
        key,
        numbers,
        prompt_key=prompt_key,
        return_raw_chat=return_raw_chat,
        limit=max_prompt_length,
        truncate=TRUNCATIONS.get(truncation, _truncate_right),
    )


def _prompts_key(rows: PromptRows, tokenizer: Tokenizer) -> str | None:
    """None: the rows are not in the cache, or the tokenizer has code of its own instead of a description."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if rows.key is None or backend is None:
        return None
    template = tokenizer.chat_template
    today = date.today().isoformat() if "strftime_now" in str(template) else None
    described = sha256(backend.to_str().encode()).hexdigest()
    return key_of(
        "prompts", rows.key, described, tokenizer.special_tokens_map, template, today, version("transformers")
    )


def _write_prompts(
    rows: PromptRows, build: Callable[[Sequence[PromptRow]], list["_Built"]], num_workers: int, draft: Draft
) -> dict[str, Any]:
    names: dict[str, int] = {}
    sources, texts = array("i"), set[int]()

    def records() -> Iterator[tuple[bytes, bytes]]:
        for text, tokens, source in _build_all(rows, build, num_workers):
            sources.append(names.setdefault(source, len(names)))
            texts.add(hash(text))
            yield text.encode(), array("i", tokens).tobytes()

    draft.write(("texts", "tokens"), records())
    draft.write(("sources",), [(sources.tobytes(),)])
    return {"sources": list(names), "different": len(texts)}


# Read all rows.


def read_all_rows(files: str | Path | Sequence[str | Path], field: str, max_samples: int | None) -> list[PlacedRow]:
    at_most = _row_limit(max_samples, field)
    rows: list[PlacedRow] = []
    for path in _paths(files, field):
        for number, values in enumerate(_rows_of(path, field, at_most)):
            rows.append(PlacedRow(len(rows), _place(f"{field}: {path}", number), values))
    return rows[:at_most]


def _row_limit(max_samples: int | None, field: str) -> int | None:
    if max_samples is not None and max_samples < 1 and max_samples != -1:
        setting = field.replace("_files", "_max_samples")
        raise ConfigError(f"{setting}={max_samples}: leaves no prompts; use 1 or more, or -1 for all of them")
    return None if max_samples == -1 else max_samples


def _paths(files: str | Path | Sequence[str | Path], field: str) -> list[str | Path]:
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise ConfigError(f"{field}=[]: names no file; give at least one parquet, json or jsonl file")
    return paths


def _content_of(path: str | Path, field: str) -> list[Any]:
    """What the rows of a file depend on: its format and its hash."""
    try:
        return content_of(path)
    except DataError as error:
        raise DataError(f"{field}: {error}") from error


def _rows_of(path: str | Path, field: str, at_most: int | None) -> Iterator[Row]:
    try:
        yield from iter_rows(path, at_most)
    except DataError as error:
        raise DataError(f"{field}: {error}") from error


def _place(source: str, number: int) -> str:
    return f"{source}, row {number} (counting from 0)"


_Built = tuple[str, Tokens, str]  # text, tokens, data source


def _build_all(
    rows: PromptRows, build: Callable[[Sequence[PromptRow]], list[_Built]], num_workers: int
) -> Iterator[_Built]:
    starts = range(0, len(rows), ROWS_PER_CHUNK)

    def built(start: int) -> list[_Built]:
        return build(rows[start : start + ROWS_PER_CHUNK])

    if num_workers == 0:
        yield from chain.from_iterable(map(built, starts))
        return
    with ThreadPoolExecutor(num_workers) as pool:
        yield from chain.from_iterable(pool.map(built, starts))


def _build(rows: Sequence[PromptRow], *, tokenizer: Tokenizer) -> list[_Built]:
    texts = []
    for row in rows:
        assert row.read.messages is not None  # no faults
        try:
            texts.append(render_chat(row.read.messages, tokenizer))
            texts[-1].encode()
        except DataError as error:
            raise DataError(f"{row.placed.place}: {error}") from error
        except UnicodeEncodeError as error:  # JSON has an escape for half of a surrogate pair
            raise DataError(
                f"{row.placed.place}: the prompt is not text ({error.reason}); correct or remove the row"
            ) from error
    found = []
    for row, text, tokens in zip(rows, texts, tokenize(texts, tokenizer), strict=True):
        if not tokens:
            raise DataError(
                f"{row.placed.place}: the tokenizer makes no token of the prompt; correct or remove the row"
            )
        assert row.read.data_source is not None
        found.append((text, tokens, row.read.data_source))
    return found


# PromptTable over the maximum length.


def _short_enough(lengths: NDArray[np.int64], limit: int, field: str) -> NDArray[np.int64]:
    """The numbers of the rows that are kept."""
    kept = np.flatnonzero(lengths <= limit)
    if not len(kept):
        raise DataError(
            f"{field}: all {len(lengths)} prompts are over data.max_prompt_length={limit} tokens and were dropped; "
            f"the shortest has {lengths.min()}. Raise data.max_prompt_length to that or more"
        )
    if len(kept) < len(lengths):
        dropped = len(lengths) - len(kept)
        log.info("%s: filtered out %d of %d prompts, longer than %d tokens", field, dropped, len(lengths), limit)
    return kept


def _refuse_overlong(lengths: NDArray[np.int64], rows: PromptRows, limit: int) -> None:
    overlong = np.flatnonzero(lengths > limit)
    if not len(overlong):
        return
    first = int(overlong[0])
    raise DataError(
        f"{rows.place(first)}: the prompt has {lengths[first]} tokens, over data.max_prompt_length={limit} "
        f"({len(overlong)} of {len(rows)} prompts are, the longest has {lengths.max()}). Raise "
        "data.max_prompt_length, set data.filter_overlong_prompts=True, or data.truncation to left, right or middle"
    )


def _truncate_left(tokens: Tokens, limit: int) -> Tokens:
    return tokens[-limit:]


def _truncate_right(tokens: Tokens, limit: int) -> Tokens:
    return tokens[:limit]


def _truncate_middle(tokens: Tokens, limit: int) -> Tokens:
    if len(tokens) <= limit:
        return tokens
    head = limit // 2
    return tokens[:head] + tokens[len(tokens) - (limit - head) :]


TRUNCATIONS: dict[str, Callable[[Tokens, int], Tokens]] = {
    "left": _truncate_left,
    "right": _truncate_right,
    "middle": _truncate_middle,
}
