"""One row of a data file, checked. `rloom train` and `rloom data check` read rows with `read_row`."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rloom.data.chat import as_prompt
from rloom.data.files import Row
from rloom.errors import DataError
from rloom.rewards.routing import rule_for
from rloom.types import Message


@dataclass(frozen=True)
class Columns:
    """How to read a row."""

    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    rules: bool = True  # a rule scores the row; otherwise a function, a reward model or a judge does
    default_data_source: str | None = None  # for rows without `reward_fn_key`
    label_key: str | None = None  # None: the ground truth is in `reward_model.ground_truth` or `ground_truth`


@dataclass(frozen=True)
class RowFault:
    column: str
    reason: str


@dataclass
class ReadRow:
    """The values of a row. Those with a fault are None."""

    messages: tuple[Message, ...] | None = None
    data_source: str | None = None
    ground_truth: Any = None
    extra_info: dict[str, Any] | None = None
    faults: list[RowFault] = field(default_factory=list)


def read_row(values: Row, columns: Columns) -> ReadRow:
    row = ReadRow()

    def read(column: str, reader: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return reader(values, *arguments)
        except DataError as error:
            row.faults.append(RowFault(column, str(error)))
            return None

    row.messages = read(columns.prompt_key, messages_of, columns.prompt_key)
    row.data_source = read(columns.reward_fn_key, data_source_of, columns.reward_fn_key, columns.default_data_source)
    row.extra_info = read("extra_info", extra_info_of)
    faults_before = len(row.faults)
    row.ground_truth = read(columns.label_key or "reward_model", ground_truth_of, columns.label_key)
    if columns.rules and row.data_source is not None and len(row.faults) == faults_before:
        where = columns.label_key or truth_column(values)
        read(where, check_ground_truth, row.data_source, row.ground_truth, where)
    return row


def messages_of(row: Row, prompt_key: str) -> tuple[Message, ...]:
    return as_prompt(_value(row, prompt_key, "data.prompt_key"))


def data_source_of(row: Row, reward_fn_key: str, default: str | None = None) -> str:
    if default is not None and row.get(reward_fn_key) is None:
        return default
    source = _value(row, reward_fn_key, "data.reward_fn_key")
    if not isinstance(source, str) or not source:
        raise DataError(f"{reward_fn_key!r} is {source!r}; it must be the name of a data source")
    return source


def ground_truth_of(row: Row, label_key: str | None = None) -> Any:
    """The column `label_key`. None: `reward_model.ground_truth`, or `ground_truth`, or None if a row has neither."""
    if label_key is not None:
        return _value(row, label_key, "data.label_key")
    nested = _mapping(row, "reward_model").get("ground_truth")
    return nested if nested is not None else row.get("ground_truth")


def extra_info_of(row: Row) -> dict[str, Any]:
    return dict(_mapping(row, "extra_info"))


def truth_column(row: Row) -> str:
    """Where a row has its ground truth, or should have it: rows of the kit have no column `reward_model`."""
    return "ground_truth" if row.get("reward_model") is None else "reward_model.ground_truth"


def check_ground_truth(_: Row, data_source: str, truth: Any, column: str) -> None:
    """Check that the rule of the data source can parse the ground truth. A source without a rule has its own fault."""
    rule = rule_for(data_source)
    if rule is None:
        return
    if truth is None or (isinstance(truth, str | list | dict) and not truth) or not str(truth).strip():
        raise DataError(f"no ground truth; set {column}")
    if isinstance(truth, float) and not math.isfinite(truth):
        raise DataError(f"{column} is {truth}; set the right answer")
    try:
        rule.true_answer(data_source, truth)
    except ValueError as error:
        raise DataError(str(error)) from error


def _value(row: Row, key: str, setting: str) -> Any:
    value = row.get(key)
    if value is None:
        columns = ", ".join(map(repr, row))
        raise DataError(f"has nothing under {key!r}; its columns are {columns}. Set {setting} to the right one")
    return value


def _mapping(row: Row, key: str) -> Mapping[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"{key!r} is {type(value).__name__}; it must be an object with keys")
    return value


class RowsDigest:
    """SHA-256 of rows as they are in the files."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()

    def add(self, row: Any) -> None:
        try:
            text = json.dumps(row, sort_keys=True, default=_plain)
        except TypeError:  # keys of several kinds have no order
            text = json.dumps(_with_text_keys(row), sort_keys=True, default=_plain)
        self.sha256.update(text.encode())


def rows_digest(rows: Iterable[Any]) -> str:
    found = RowsDigest()
    for row in rows:
        found.add(row)
    return found.sha256.hexdigest()


def _plain(value: Any) -> Any:
    """The order of a set depends on the hash seed of the process."""
    return sorted(map(repr, value)) if isinstance(value, set | frozenset) else str(value)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {repr(key): _with_text_keys(one) for key, one in value.items()}
    return [_with_text_keys(one) for one in value] if isinstance(value, list | tuple) else value
