"""From data files to prompts: read and check rows, which needs no torch; then render and tokenize them, and apply the
maximum prompt length."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from rloom.data.chat import Tokenizer, render_chat, tokenize
from rloom.data.files import Row, read_rows
from rloom.data.rows import Columns, ReadRow, read_row
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


def read_prompt_rows(
    files: str | Path | Sequence[str | Path] | GivenRows,
    columns: Columns,
    *,
    max_samples: int | None,
    field: str = "data.train_files",
) -> list[PromptRow]:
    """The rows of all files in order, checked. `max_samples` (None, -1: all) selects the first rows."""
    return [_checked(row, columns) for row in read_all_rows(files, field, max_samples)]


def _checked(row: PlacedRow, columns: Columns) -> PromptRow:
    read = read_row(row.values, columns)
    if read.faults:
        raise DataError(f"{row.place}: {read.faults[0].reason}")
    return PromptRow(row, read)


def load_prompts(
    rows: Sequence[PromptRow],
    *,
    tokenizer: Tokenizer,
    prompt_key: str,
    max_prompt_length: int,
    filter_overlong: bool,
    truncation: Truncation,
    num_workers: int,
    return_raw_chat: bool,
    custom_chat_template: str | None = None,
    field: str = "data.train_files",
) -> list[Prompt]:
    """`Prompt.index` counts rows before filtering. `Prompt.text` is not truncated."""
    build = partial(
        _build,
        tokenizer=tokenizer,
        prompt_key=prompt_key,
        return_raw_chat=return_raw_chat,
        custom_chat_template=custom_chat_template,
    )
    prompts = _build_all(rows, build, tokenizer, num_workers)
    if filter_overlong:
        return _filter(prompts, max_prompt_length, field)
    if truncation == "error":
        _refuse_overlong(prompts, rows, max_prompt_length)
        return prompts
    truncate = TRUNCATIONS[truncation]
    return [replace(p, tokens=truncate(p.tokens, max_prompt_length)) for p in prompts]


# Read all rows.


def read_all_rows(
    files: str | Path | Sequence[str | Path] | GivenRows, field: str, max_samples: int | None
) -> list[PlacedRow]:
    if max_samples is not None and max_samples < 1 and max_samples != -1:
        setting = field.replace("_files", "_max_samples")
        raise ConfigError(f"{setting}={max_samples}: leaves no prompts; use 1 or more, or -1 for all of them")
    at_most = None if max_samples == -1 else max_samples
    rows = _place(files.name, files.rows) if isinstance(files, GivenRows) else _read_files(files, field, at_most)
    return rows[:at_most]


def _read_files(files: str | Path | Sequence[str | Path], field: str, at_most: int | None) -> list[PlacedRow]:
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise ConfigError(f"{field}=[]: names no file; give at least one parquet, json or jsonl file")
    rows: list[PlacedRow] = []
    for path in paths:
        try:
            values = read_rows(path, at_most)
        except DataError as error:
            raise DataError(f"{field}: {error}") from error
        rows += _place(f"{field}: {path}", values, first=len(rows))
    return rows


def _place(source: str, rows: Sequence[Row], first: int = 0) -> list[PlacedRow]:
    return [
        PlacedRow(first + number, f"{source}, row {number} (counting from 0)", row) for number, row in enumerate(rows)
    ]


def _build_all(
    rows: Sequence[PromptRow],
    build: Callable[[Sequence[PromptRow]], list[Prompt]],
    tokenizer: Tokenizer,
    num_workers: int,
) -> list[Prompt]:
    chunks = [rows[start : start + ROWS_PER_CHUNK] for start in range(0, len(rows), ROWS_PER_CHUNK)]
    if num_workers == 0:
        return list(chain.from_iterable(map(build, chunks)))
    # The first call disables a truncation stored in tokenizer.json; a fast tokenizer must not change while other
    # threads use it.
    tokenize([""], tokenizer)
    with ThreadPoolExecutor(num_workers) as pool:
        return list(chain.from_iterable(pool.map(build, chunks)))


def _build(
    rows: Sequence[PromptRow],
    *,
    tokenizer: Tokenizer,
    prompt_key: str,
    return_raw_chat: bool,
    custom_chat_template: str | None,
) -> list[Prompt]:
    prompts = []
    for row in rows:
        read, values = row.read, row.placed.values
        assert read.messages is not None and read.data_source is not None and read.extra_info is not None  # no faults
        try:
            text = render_chat(read.messages, tokenizer, custom_chat_template)
        except DataError as error:
            raise DataError(f"{row.placed.place}: {error}") from error
        prompt = Prompt(
            index=row.placed.index,
            messages=read.messages,
            text=text,
            tokens=(),
            data_source=read.data_source,
            ground_truth=read.ground_truth,
            extra_info=read.extra_info | ({"raw_prompt": list(read.messages)} if return_raw_chat else {}),
            columns=values | {"prompt": values[prompt_key]},
        )
        prompts.append(prompt)
    tokens_of_prompts = tokenize([prompt.text for prompt in prompts], tokenizer)
    for row, tokens in zip(rows, tokens_of_prompts, strict=True):
        if not tokens:
            raise DataError(
                f"{row.placed.place}: the tokenizer makes no token of the prompt; correct or remove the row"
            )
    return [replace(prompt, tokens=tokens) for prompt, tokens in zip(prompts, tokens_of_prompts, strict=True)]


# Prompts over the maximum length.


def _filter(prompts: Sequence[Prompt], limit: int, field: str) -> list[Prompt]:
    kept = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
    if not kept:
        shortest = min(len(prompt.tokens) for prompt in prompts)
        raise DataError(
            f"{field}: all {len(prompts)} prompts are over data.max_prompt_length={limit} tokens and were dropped; "
            f"the shortest has {shortest}. Raise data.max_prompt_length to that or more"
        )
    if len(kept) < len(prompts):
        dropped = len(prompts) - len(kept)
        log.info("%s: filtered out %d of %d prompts, longer than %d tokens", field, dropped, len(prompts), limit)
    return kept


def _refuse_overlong(prompts: Sequence[Prompt], rows: Sequence[PromptRow], limit: int) -> None:
    overlong = [
        (row, len(prompt.tokens)) for row, prompt in zip(rows, prompts, strict=True) if len(prompt.tokens) > limit
    ]
    if not overlong:
        return
    row, length = overlong[0]
    longest = max(tokens for _, tokens in overlong)
    raise DataError(
        f"{row.placed.place}: the prompt has {length} tokens, over data.max_prompt_length={limit} ({len(overlong)} of "
        f"{len(prompts)} prompts are, the longest has {longest}). Raise data.max_prompt_length, set "
        "data.filter_overlong_prompts=True, or data.truncation to left, right or middle"
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
