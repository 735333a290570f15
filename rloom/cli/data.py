"""`rloom data prepare NAME`, `rloom data check FILE`"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rloom.console import run_safely


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom data", description="Prepare and check data files.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="write train.parquet and test.parquet of a known data set")
    prepare.add_argument("name", help="gsm8k, math or arithmetic")
    prepare.add_argument("--local_save_dir", "--local_dir", required=True, type=Path)
    prepare.add_argument("--source", type=Path, help="a folder with the raw files, instead of a download")
    check = commands.add_parser("check", help="rows, faults, duplicates, unknown data sources; exit 1 on faults")
    check.add_argument("file")
    check.add_argument("--tokenizer", help="a model folder or hub name: adds a histogram of prompt lengths")
    check.add_argument("--own_reward", action="store_true", help="your own reward function scores every data source")
    given = parser.parse_args(arguments)
    return run_safely(lambda: prepare_data(given) if given.command == "prepare" else check_data(given))


def prepare_data(given: argparse.Namespace) -> int:
    from rloom.data.prepare import prepare

    for file in prepare(given.name, given.local_save_dir, given.source):
        print(file)
    return 0


def check_data(given: argparse.Namespace) -> int:
    from rloom.data.check import check_file, render_report

    tokenizer = None
    if given.tokenizer:
        from rloom.models.load import ModelSource, load_tokenizer

        tokenizer = load_tokenizer(ModelSource(given.tokenizer, key="--tokenizer"))
    report = check_file(given.file, tokenizer=tokenizer, own_reward=given.own_reward)
    print(render_report(report))
    return 0 if report.ok else 1
