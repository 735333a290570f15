"""`rloom kit [flags] [key=value ...]`: `rloom train` with the flags, variables and files of train.sh."""

import os
from collections.abc import Sequence

from rloom.config.base import EMBEDDED_NAME
from rloom.config.frontends.short_names import BATCH, MINI_BATCH, mini_batch
from rloom.config.frontends.smoke import is_on
from rloom.config.frontends.train_sh import DATA_KEY, VAL_KEY, KitCommand, split, translate
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.console import run_safely
from rloom.errors import DataError
from rloom.language import translate as in_language
from rloom.trainer import main_ppo

FORGOTTEN = (
    "WARNING: no --data is given, so {} trains on rloom's embedded sums, such as 12 + 29. "
    "For your own prompts: --data FILE (json, jsonl or parquet), or TRAIN_DATA=FILE"
)


def main(arguments: Sequence[str]) -> int:
    def run() -> int:
        command = translate(arguments, os.environ)
        config = load_config(command.overrides, command.values)
        if is_on(os.environ):  # a smoke run prints what it replaces
            return main_ppo.train(config)
        print(in_language(f"Model: {command.model} · Data: {command.data} · {command.reward}"), flush=True)
        if command.uses_embedded_data_only:
            print(in_language(FORGOTTEN.format(command.model)), flush=True)
        return main_ppo.train(with_fitting_batch(command, config))

    return run_safely(run)


def with_fitting_batch(command: KitCommand, config: Config) -> Config:
    """With fewer prompts than the default batch, a step takes all of them. A chosen batch size stays."""
    data = config.data
    if command.data == EMBEDDED_NAME:
        return config
    typed = split(command.overrides)
    try:
        rows = row_count(data.train_files, DATA_KEY if DATA_KEY in typed else "--data")
        row_count(data.val_files or [], VAL_KEY if VAL_KEY in typed else "--val")
    except DataError:
        if config.trainer.node_rank == 0:
            raise
        return config  # machine 0 reads the data
    if data.train_max_samples > 0:
        rows = min(rows, data.train_max_samples)
    if command.chooses_batch_size or rows >= data.train_batch_size:
        return config
    found = f"{rows} rows" if rows != 1 else "1 row"
    notice = (
        f"Batch: {command.data} has {found}, fewer than the default batch of {data.train_batch_size}; a step takes all "
        "of them. --batch_size sets another number"
    )
    print(in_language(notice), flush=True)
    return load_config(command.overrides, {**command.values, BATCH: rows, MINI_BATCH: mini_batch(rows)})


def row_count(files: str | list[str], given_as: str) -> int:
    from rloom.data.files import count_rows

    try:
        return sum(count_rows(file) for file in ([files] if isinstance(files, str) else files))
    except DataError as error:
        raise DataError(f"{given_as}: {error}") from error
