"""Rows that are in memory: a list of mappings, a pandas DataFrame, a datasets.Dataset, or any iterable of mappings."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from rloom.data.files import Row, without_filled_keys
from rloom.errors import DataError

OWN_COLUMNS = ("prompt", "data_source", "ground_truth", "reward_model", "extra_info")
ACCEPTED = "a list of dicts, a datasets.Dataset, a pandas DataFrame, or any iterable of mappings"


def rows_of(given: Any, name: str) -> list[Row]:
    """`name`: the argument, for error messages."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise DataError(
            f"{name} is {type(given).__name__}; use {ACCEPTED}. A file is named by the key data.train_files or "
            "data.val_files"
        )
    if isinstance(given, Mapping):
        parts = ", ".join(map(repr, given))
        raise DataError(f"{name} is a mapping with {parts}; use {ACCEPTED}: of a DatasetDict, one of its splits")
    library = type(given).__module__.split(".")[0]
    found = _of_pandas(given, name) if library == "pandas" else list(given)
    if not found:
        raise DataError(f"{name} holds no rows")
    for number, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{name}, row {number} (counting from 0): is {type(row).__name__}; a row is a mapping with the column "
                "'prompt'"
            )
    if library in ("pandas", "datasets"):  # both store columns as Arrow does
        return [{column: without_filled_keys(value) for column, value in row.items()} for row in found]
    return [dict(row) for row in found]


def with_defaults(row: Row, *, prompt_key: str, reward_fn_key: str, data_source: str | None) -> Row:
    """The row with its further columns in extra_info, and with `data_source` if it has none and one is given."""
    own = {*OWN_COLUMNS, prompt_key, reward_fn_key}
    extra = row.get("extra_info")
    others = {name: value for name, value in row.items() if name not in own}
    filled = dict(row)
    if extra is None or isinstance(extra, Mapping):  # another type is an error, which names the row
        filled["extra_info"] = {**others, **(extra or {})}
    if data_source is not None and filled.get(reward_fn_key) is None:
        filled[reward_fn_key] = data_source
    return filled


def _of_pandas(frame: Any, name: str) -> list[Row]:
    """By way of Arrow, which makes None of missing values and lists of NumPy's arrays."""
    try:
        rows: list[Row] = pa.Table.from_pandas(frame, preserve_index=False).to_pylist()
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{name}: the {type(frame).__name__} cannot be read ({error}); use {ACCEPTED}") from error
    return rows
