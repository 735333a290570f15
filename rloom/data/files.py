"""Read rows of data files: parquet, json (a list of objects) and jsonl (one object per line), also json*.gz."""

import gzip
import json
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from rloom.errors import DataError
from rloom.hashed_files import file_sha256

Row = dict[str, Any]

ROWS_AT_ONCE = 1024  # of a parquet file
MOST_NESTING = 64  # lists and objects inside of each other; what reads a row later on recurses
SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")


def read_rows(path: str | Path, at_most: int | None = None) -> list[Row]:
    """The rows of a local file, or the first `at_most` of them, as plain Python values."""
    return list(iter_rows(path, at_most))


def iter_rows(path: str | Path, at_most: int | None = None) -> Iterator[Row]:
    """Rows one after the other: only those of a .json file are in memory together."""
    file = locate(path)
    suffix = _suffix(file)
    readers = {".parquet": _read_parquet, ".json": _read_json, ".json.gz": _read_json}
    number = 0
    try:
        for row in readers.get(suffix, _read_jsonl)(file):
            if number == at_most:
                return
            number += 1
            yield row
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); check its permissions, or copy it again") from error
    if number == 0:
        raise _no_rows(file)


def content_of(path: str | Path) -> list[Any]:
    """What the rows of a file depend on: its format and its hash."""
    file = locate(path)
    try:
        return [_suffix(file), file_sha256(file)]
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}); check its permissions, or copy it again") from error


def count_rows(path: str | Path) -> int:
    """The number of rows of a file; that of parquet is read from its footer."""
    file = locate(path)
    if _suffix(file) != ".parquet":
        return len(read_rows(file))
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise _not_parquet(file, error) from error
    if not rows:
        raise _no_rows(file)
    return rows


def _no_rows(file: Path) -> DataError:
    return DataError(f"{file}: holds no rows; write it again, or name another file")


def locate(path: str | Path) -> Path:
    """The file that `path` names, `~` and environment variables expanded."""
    if "://" in str(path):
        raise DataError(f"{path}: only local files are read; download it and use the path of the copy")
    file = Path(os.path.expandvars(path)).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        inside = sorted(entry.name for entry in file.iterdir() if entry.name.endswith(SUFFIXES))
        found = f"name a file in it: {', '.join(inside)}" if inside else f"it holds no {_or(SUFFIXES)} file"
        raise DataError(f"{file}: is a folder; {found}")
    raise DataError(f"{file}: no such file; {_nearest_file(file)}")


def _nearest_file(file: Path) -> str:
    if not file.parent.is_dir():
        return f"the folder {file.parent} does not exist either. `rloom data prepare` writes the known data sets"
    names = [entry.name for entry in file.parent.iterdir() if entry.name.endswith(SUFFIXES)]
    nearest = get_close_matches(file.name, names, n=1, cutoff=0.0)
    if not nearest:
        return f"the folder {file.parent} holds no data files. `rloom data prepare` writes the known data sets"
    return f"the nearest name in {file.parent} is {nearest[0]}"


def _suffix(file: Path) -> str:
    for suffix in SUFFIXES:
        if file.name.endswith(suffix):
            return suffix
    raise DataError(f"{file}: the name determines the format and must end in {_or(SUFFIXES)}")


def _or(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow as pa  # not with the module: a run looks for its files before its first line, and this takes 0.2 s
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    yield {name: without_filled_keys(value) for name, value in row.items()}
    except (pa.ArrowException, ValueError) as error:
        raise _not_parquet(file, error) from error


def _not_parquet(file: Path, error: Exception) -> DataError:
    return DataError(f"{file}: not a readable parquet file ({error}); write it again")


def without_filled_keys(value: Any) -> Any:
    """Parquet gives all structs of a column the same keys, with None for those a row did not have: remove them."""
    if isinstance(value, dict):
        return {key: without_filled_keys(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_filled_keys(inner) for inner in value]
    return value


def _open(file: Path) -> BinaryIO:
    return gzip.open(file) if file.name.endswith(".gz") else file.open("rb")  # type: ignore[return-value]


def _text(file: Path, content: bytes, line: int = 1) -> str:
    """`line`: that of the content's beginning."""
    try:
        # editors on Windows write a byte order mark, which is not valid JSON
        return (content.removeprefix(BOM_UTF8) if line == 1 else content).decode()
    except UnicodeDecodeError as error:
        line += error.object.count(b"\n", 0, error.start)
        raise DataError(
            f"{file}, line {line}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error


def has_byte_order_mark(file: Path) -> bool:
    with _open(file) as stream:
        return stream.read(len(BOM_UTF8)) == BOM_UTF8


def _read_json(file: Path) -> list[Row]:
    with _open(file) as stream:
        text = _text(file, stream.read())
    if not text.strip():
        return []
    try:
        values = _loads(text)
    except json.JSONDecodeError as error:
        # "Extra data", a second value after the first, means a jsonl file with the wrong suffix
        hint = "if it holds one object per line, name it .jsonl" if error.msg == "Extra data" else "correct that line"
        raise DataError(f"{file}, line {error.lineno}: not valid JSON ({error.msg}); {hint}") from error
    if not isinstance(values, list):
        raise DataError(f"{file}: holds one {_json_type(values)}; a data file is a list of objects, one per row")
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(f"{file}, row {number} (counting from 0): is {_json_type(value)}, a row must be an object")
    return values


def _read_jsonl(file: Path) -> Iterator[Row]:
    with _open(file) as stream:
        for number, content in enumerate(stream, start=1):
            line = _text(file, content, number)
            if not line.strip():
                continue
            try:
                value = _loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{file}, line {number}: not valid JSON ({error.msg}); correct or remove the line"
                ) from error
            if not isinstance(value, dict):
                raise DataError(f"{file}, line {number}: is {_json_type(value)}, each line must be an object")
            yield value


def _loads(text: str) -> Any:
    """Whatever it refuses is a JSONDecodeError with its place."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep(text) from None
    except ValueError as error:  # an integer of thousands of digits
        raise json.JSONDecodeError(str(error), text, 0) from None
    if text.count("[") + text.count("{") > MOST_NESTING and _is_too_deep(value):
        raise _too_deep(text)
    return value


def _too_deep(text: str) -> json.JSONDecodeError:
    message = f"lists and objects inside of each other, more than {MOST_NESTING} deep"
    deepest, depth = 0, 0
    for place, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")  # brackets in a text may count: it is a place near the fault
        if depth > MOST_NESTING + 1:
            deepest = place
            break
    return json.JSONDecodeError(message, text, deepest)


def _is_too_deep(value: Any) -> bool:
    """The list of rows is not counted."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTING + 2):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [inner for each in inside for inner in each if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
