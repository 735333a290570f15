"""Known data sets, written in rloom's row layout as `train.parquet` and `test.parquet`.

A row:
    data_source   selects the reward rule
    prompt        chat messages
    ability       math, code, ...
    reward_model  {style: rule or model, ground_truth}
    extra_info    {split, index in the source, and further columns of the source}
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rloom.data.files import Row
from rloom.errors import DataError, RloomError
from rloom.extras import install_command

Splits = tuple[list[Row], list[Row]]  # train, test

# As in recipes/embedded: with another seed, the test problems would include training problems of the embedded model.
ARITHMETIC_TRAIN_ROWS, ARITHMETIC_TEST_ROWS, ARITHMETIC_SEED = 8192, 512, 0


@dataclass(frozen=True)
class Preparer:
    summary: str
    source_files: tuple[str, ...]  # of a --source folder; empty: the data is generated
    splits: Callable[[Path | None], Splits]


# The module of each data set is imported on use, because it imports this module.


def _gsm8k(source: Path | None) -> Splits:
    from rloom.data.prepare import gsm8k

    return gsm8k.splits(source)


def _math(source: Path | None) -> Splits:
    from rloom.data.prepare import math

    return math.splits(source)


def _humaneval(source: Path | None) -> Splits:
    from rloom.data.prepare import humaneval

    return humaneval.splits(source)


def _mbpp(source: Path | None) -> Splits:
    from rloom.data.prepare import mbpp

    return mbpp.splits(source)


def _arithmetic(source: Path | None) -> Splits:
    from rloom.data.prepare import arithmetic

    if source is not None:
        raise DataError(f"--source {source}: arithmetic is generated, not read; leave --source out")
    return arithmetic.rows(train=ARITHMETIC_TRAIN_ROWS, test=ARITHMETIC_TEST_ROWS, seed=ARITHMETIC_SEED)


PREPARERS: dict[str, Preparer] = {
    "gsm8k": Preparer("grade-school word problems (openai/gsm8k)", ("train.jsonl", "test.jsonl"), _gsm8k),
    "math": Preparer("competition problems (MATH, tested on MATH-500)", ("train.json", "test500.jsonl"), _math),
    "humaneval": Preparer(
        "Python functions to complete (openai/openai_humaneval)", ("HumanEval.jsonl.gz",), _humaneval
    ),
    "mbpp": Preparer("short Python functions with three tests each (MBPP)", ("mbpp.jsonl",), _mbpp),
    "arithmetic": Preparer("sums and differences of two-digit numbers, in Chinese and English", (), _arithmetic),
}


def prepare(name: str, save_dir: str | Path, source: str | Path | None) -> list[Path]:
    """Write `train.parquet` and `test.parquet` of a known data set. `source`: a folder with the original files; None:
    download them."""
    if name not in PREPARERS:
        raise DataError(f"{name}: not a known data set; choose one of {', '.join(PREPARERS)}")
    folder = Path(save_dir).expanduser()
    train, test = PREPARERS[name].splits(None if source is None else Path(source).expanduser())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [write_parquet(train, folder / "train.parquet"), write_parquet(test, folder / "test.parquet")]
    except OSError as error:
        raise DataError(f"--local_save_dir {folder}: cannot be written ({error}); choose another folder") from error


def write_parquet(rows: Sequence[Row], path: Path) -> Path:
    """Write to a temporary file and rename it: a reader sees the old file or the complete new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def load_from_hub(repository: str, *, split: str, subset: str | None = None) -> list[Row]:
    """Rows of a Hugging Face data set, through the `datasets` library. Its import takes a second and brings pandas."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{repository}: the `datasets` library cannot be imported ({error}). Pass a folder with the data set's "
            f"files as --source, or install it: {install_command()}"
        ) from error
    try:
        rows: list[Row] = datasets.load_dataset(repository, subset, split=split).to_list()
    except Exception as error:  # network, hub and cache raise different classes
        raise DataError(
            f"{repository}: cannot be downloaded ({error}); check the network, or pass a folder with the data set's "
            "files as --source"
        ) from error
    return rows


def script(name: str, arguments: Sequence[str] | None = None) -> int:
    """The command line of `examples/data_preprocess/`."""
    preparer = PREPARERS[name]
    parser = argparse.ArgumentParser(description=f"Write train.parquet and test.parquet: {preparer.summary}.")
    parser.add_argument(
        "--local_save_dir", "--local_dir", default=f"~/data/{name}", metavar="DIR", help="where to write (%(default)s)"
    )
    files = " and ".join(preparer.source_files)
    help_of_source = (
        f"folder with {files}; without it they are downloaded" if files else "not used: the data is generated"
    )
    parser.add_argument("--source", default=None, metavar="DIR", help=help_of_source)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        written = prepare(name, options.local_save_dir, options.source)
    except RloomError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0
