"""`rloom data show`: rows of a data file as readable text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloom.data import chat
from rloom.data.check import counted
from rloom.data.files import Row, read_rows
from rloom.data.rows import Columns, read_row, truth_column
from rloom.errors import DataError

LONGEST_TEXT = 2000  # characters


def show_rows(
    path: str | Path, first: int, count: int, columns: Columns, tokenizer: chat.Tokenizer | None = None
) -> str:
    rows = read_rows(path)
    if not 0 <= first < len(rows):
        raise DataError(f"{path}: has no row {first}; its rows are 0 to {len(rows) - 1}")
    shown = range(first, min(first + count, len(rows)))
    heading = f"{path}: {counted(len(rows))} (numbered from 0)"
    return "\n\n".join([heading, *(_show(number, rows[number], columns, tokenizer) for number in shown)])


def _show(number: int, values: Row, columns: Columns, tokenizer: chat.Tokenizer | None) -> str:
    row = read_row(values, columns)
    lines = [f"--- row {number}", f"{columns.reward_fn_key}: {_text(row.data_source)}"]
    if row.messages is not None:
        lines += _show_prompt(row.messages, tokenizer)
    lines.append(f"{truth_column(values)}: {_text(row.ground_truth)}")
    lines += [f"{name}: {_text(value)}" for name, value in _other_values(values, columns).items()]
    return "\n".join([*lines, *(f"fault in {fault.column}: {fault.reason}" for fault in row.faults)])


def _other_values(values: Row, columns: Columns) -> dict[str, Any]:
    """What is neither prompt nor data source nor ground truth, one level deep."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    shown = (columns.prompt_key, columns.reward_fn_key, "ground_truth", "reward_model.ground_truth")
    return {name: value for name, value in flat.items() if name not in shown}


def _show_prompt(messages: Sequence[Any], tokenizer: chat.Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return [f"[{message['role']}] {_text(message['content'])}" for message in messages]
    text = chat.render_chat(messages, tokenizer)
    (tokens,) = chat.tokenize([text], tokenizer)
    return [f"prompt, {len(tokens)} tokens:", _text(text)]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]}... (the first {LONGEST_TEXT} of {len(text)} characters)"
