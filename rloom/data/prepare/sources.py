"""The published files of a data set: on the hub, or in a folder that --source names."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rloom.data.files import Row, read_rows
from rloom.errors import DataError
from rloom.hub import download_data


@dataclass(frozen=True)
class RawFiles:
    """One split. Patterns may match several files."""

    repository: str  # on the hub
    on_hub: str  # pattern of the paths in the repository; a folder made by `hf download` has the same paths
    original: str  # pattern of the file names that the authors publish elsewhere
    single: bool = False  # both splits are in one file, which --source may name

    @property
    def names(self) -> str:
        return f"{self.original} (or {self.on_hub})"


@dataclass(frozen=True)
class RawRow:
    place: str  # file and row number, for error messages
    index: int  # in the split
    values: Row


def read_split(files: RawFiles, source: Path | None) -> list[RawRow]:
    """`source`: a folder or a file; None: the hub."""
    paths = _from_hub(files) if source is None else _from_folder(files, source)
    return [RawRow(place, index, values) for index, (place, values) in enumerate(_rows(paths))]


def _rows(paths: list[Path]) -> Iterator[tuple[str, Row]]:
    for path in paths:
        for number, values in enumerate(read_rows(path)):
            yield f"{path}, row {number} (counting from 0)", values


def _from_hub(files: RawFiles) -> list[Path]:
    way_out = (
        f"get the files elsewhere and pass their folder: --source FOLDER with {files.names}. "
        f"`hf download {files.repository} --repo-type dataset --local-dir FOLDER` fills it"
    )
    return download_data(files.repository, files.on_hub, way_out)


def _from_folder(files: RawFiles, source: Path) -> list[Path]:
    if source.is_file() and files.single:
        return [source]
    if not source.is_dir():
        raise DataError(f"--source {source}: is not a folder; give a folder with {files.names}")
    found = sorted(source.glob(files.original)) or sorted(source.glob(files.on_hub))
    if not found:
        held = ", ".join(sorted(entry.name for entry in source.iterdir())[:8]) or "nothing"
        raise DataError(f"--source {source}: holds no {files.names}; it holds {held}")
    return found


def check_columns(row: RawRow, columns: Mapping[str, type], expected: str) -> None:
    missing = [column for column, kind in columns.items() if not isinstance(row.values.get(column), kind)]
    if missing:
        raise DataError(f"{row.place}: no {' and no '.join(missing)}; pass {expected} as --source")
