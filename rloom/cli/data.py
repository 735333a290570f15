"""`rloom data prepare NAME`, `rloom data environments`, `rloom data check FILE`, `rloom data show FILE`"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rloom.cli.parsing import CommandParser
from rloom.console import run_safely
from rloom.errors import ConfigError
from rloom.language import translate
from rloom.terminal import printable

if TYPE_CHECKING:
    from rloom.data.chat import Tokenizer
    from rloom.data.rows import Columns

SETS = "gsm8k, math, hh_rlhf, humaneval, mbpp, arithmetic, or an environment with data of its own"
SOURCES = """
The files come from the Hugging Face hub, from a mirror of it (HF_ENDPOINT=https://hf-mirror.com) or from a folder:
  rloom data prepare gsm8k --local_save_dir ~/data/gsm8k
  rloom data prepare gsm8k --local_save_dir ~/data/gsm8k --source FOLDER
"""


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("rloom data", description="Prepare, check and show data files.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="write train.parquet and test.parquet of a known data set",
        description="Write train.parquet and test.parquet of a known data set.",
        epilog=SOURCES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.add_argument("name", help=SETS)
    _add_prepare_arguments(prepare, "~/data/NAME")
    commands.add_parser("environments", help="list rloom's environments, their usual keys and how to make their data")
    check = commands.add_parser("check", help="errors (exit status 1) and warnings with their row numbers")
    check.add_argument("file", nargs="+", help="parquet, json or jsonl; a prompt in two files is a warning")
    check.add_argument("--max_prompt_length", type=int, metavar="TOKENS", help="as data.max_prompt_length of the run")
    check.add_argument("--own_reward", action="store_true", help="your own reward function scores the rows")
    check.add_argument("--reward_model", action="store_true", help="a reward model or an API judge scores the rows")
    show = commands.add_parser("show", help="print rows: prompt, ground truth and the other columns")
    show.add_argument("file")
    show.add_argument("-n", type=int, default=None, metavar="ROWS", help="number of rows (3; 1 with --row)")
    show.add_argument("--row", type=int, default=None, metavar="K", help="the first row, counting from 0")
    for reader in (check, show):
        reader.add_argument("--tokenizer", metavar="MODEL", help="folder or hub name: renders prompts, counts tokens")
        reader.add_argument("--prompt_key", default="prompt", help="as data.prompt_key of the run")
        reader.add_argument("--reward_fn_key", default="data_source", help="as data.reward_fn_key of the run")
    given = parser.parse_args(arguments)
    return run_safely(lambda: COMMANDS[given.command](given))


def script(name: str) -> int:
    """The command line of `examples/data_preprocess/NAME.py`."""
    parser = CommandParser(
        description=f"Write train.parquet and test.parquet of {name}.",
        epilog=SOURCES.replace("gsm8k", name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_prepare_arguments(parser, f"~/data/{name}")
    given = parser.parse_args(sys.argv[1:], argparse.Namespace(name=name))
    return run_safely(lambda: prepare_data(given))


def _add_prepare_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--local_save_dir", "--local_dir", type=Path, metavar="DIR", help=f"where to write ({default})")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="the published files, instead of a download")
    instruction = "gsm8k, math: what follows each question, instead of the usual instruction"
    parser.add_argument("--instruction", metavar="TEXT", help=instruction)


def prepare_data(given: argparse.Namespace) -> int:
    from rloom.data.prepare import prepare

    folder = given.local_save_dir or Path("~/data") / given.name
    for file, rows in prepare(given.name, folder, given.source, given.instruction).items():
        print(translate(f"{file}: {rows} rows"))
    return 0


def list_environments(given: argparse.Namespace) -> int:
    from rloom.environments.kinds import ENVIRONMENTS, MULTI_TURN

    for name, kind in ENVIRONMENTS.items():
        print(f"{name}\n  {translate(kind.description)}")
        keys = {f"{MULTI_TURN}.environment": name, **kind.keys}
        print(f"  rloom train {' '.join(f'{key}={value}' for key, value in keys.items())}")
        for data in (*([name] if kind.rows is not None else []), *kind.data):
            print(f"  rloom data prepare {data}")
    return 0


def check_data(given: argparse.Namespace) -> int:
    from rloom.data.check import CheckSettings, check_files, render_report

    if given.max_prompt_length is not None and given.tokenizer is None:
        raise ConfigError("--max_prompt_length: tokens are counted by a tokenizer; add --tokenizer MODEL")
    settings = CheckSettings(
        _columns(given, rules=not (given.own_reward or given.reward_model)),
        _tokenizer(given.tokenizer),
        given.max_prompt_length,
    )
    reports = check_files(given.file, settings)
    print(printable(translate("\n\n".join(map(render_report, reports)))))
    return 0 if all(report.ok for report in reports) else 1


def show_data(given: argparse.Namespace) -> int:
    from rloom.data.check import show_rows

    count = given.n if given.n is not None else (3 if given.row is None else 1)
    if count < 1:
        raise ConfigError(f"-n {count}: shows no row; use 1 or more")
    # no rule: a fault of the ground truth is for `rloom data check`
    columns = _columns(given, rules=False)
    print(printable(show_rows(given.file, given.row or 0, count, columns, _tokenizer(given.tokenizer))))
    return 0


COMMANDS = {"prepare": prepare_data, "environments": list_environments, "check": check_data, "show": show_data}


def _columns(given: argparse.Namespace, *, rules: bool) -> "Columns":
    from rloom.data.rows import Columns

    return Columns(given.prompt_key, given.reward_fn_key, rules)


def _tokenizer(name: str | None) -> "Tokenizer | None":
    if name is None:
        return None
    from rloom.models.load import load_tokenizer
    from rloom.models.source import ModelSource

    tokenizer: Tokenizer = load_tokenizer(ModelSource(name, key="--tokenizer"))
    return tokenizer
