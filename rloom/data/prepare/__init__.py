"""Known data sets, written in rloom's row layout as `train.parquet` and `test.parquet`.

A row:
    data_source   selects the reward rule
    prompt        chat messages
    ability       math, code, alignment
    reward_model  {style: rule or model, ground_truth}
    extra_info    {split, index in the source, and further columns of the source}
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rloom.data.files import Row
from rloom.data.prepare import arithmetic, code, hh_rlhf, math
from rloom.environments.kinds import ENVIRONMENTS
from rloom.errors import DataError
from rloom.plugins import referenced

# name -> the train rows and the test rows, from --source or from the hub
PREPARERS: Mapping[str, Callable[[Path | None], tuple[list[Row], list[Row]]]] = {
    "gsm8k": math.gsm8k_splits,
    "math": math.math_splits,
    "hh_rlhf": hh_rlhf.splits,
    "humaneval": code.humaneval_splits,
    "mbpp": code.mbpp_splits,
    "arithmetic": arithmetic.splits,
}
INSTRUCTED = ("gsm8k", "math")  # sets whose prompts are a question and an instruction
GENERATED = {name: kind.rows for name, kind in ENVIRONMENTS.items() if kind.rows is not None}  # by environments


def prepare(
    name: str, save_dir: str | Path, source: str | Path | None, instruction: str | None = None
) -> dict[Path, int]:
    """Write `train.parquet` and `test.parquet` of a known data set, and return their numbers of rows.

    `source`: a folder with the original files; None: download them. `instruction`: what follows each question, instead
    of the usual instruction.
    """
    if name not in PREPARERS and name not in GENERATED:
        if name in ENVIRONMENTS:
            others = " or ".join(ENVIRONMENTS[name].data)
            raise DataError(f"{name}: an environment without data of its own; prepare those it is for: {others}")
        raise DataError(f"{name}: not a known data set; choose one of {', '.join([*PREPARERS, *GENERATED])}")
    if name in GENERATED and source is not None:
        raise DataError(f"--source {source}: {name} is generated, not read; leave --source out")
    if instruction is not None and name not in INSTRUCTED:
        raise DataError(f"--instruction: {name} has none to replace, as {' and '.join(INSTRUCTED)} have; leave it out")
    folder = Path(save_dir).expanduser()
    if name in GENERATED:
        train, test = referenced(GENERATED[name])()
    else:
        train, test = PREPARERS[name](None if source is None else Path(source).expanduser())
    if instruction is not None:
        train, test = instructed(train, instruction), instructed(test, instruction)
    written = {folder / "train.parquet": train, folder / "test.parquet": test}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, rows in written.items():
            write_parquet(rows, path)
    except OSError as error:
        raise DataError(f"--local_save_dir {folder}: cannot be written ({error}); choose another folder") from error
    return {path: len(rows) for path, rows in written.items()}


def instructed(rows: Sequence[Row], instruction: str) -> list[Row]:
    """Rows whose prompts are their question and `instruction`."""
    prompts = (f"{row['extra_info']['question']} {instruction}".strip() for row in rows)
    return [{**row, "prompt": [{"role": "user", "content": text}]} for row, text in zip(rows, prompts, strict=True)]


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write to a temporary file and rename it: a reader sees the old file or the complete new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
