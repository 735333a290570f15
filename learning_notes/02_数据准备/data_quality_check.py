"""检查数据质量：python learning_notes/02_数据准备/data_quality_check.py ~/data/gsm8k/train.parquet [--tokenizer 模型]

依次给出：格式检查（同 `rloom data check`）、prompt 长度、前两行样本（同 `rloom data show`）。
有错误时退出码为 1。其余参数（--own_reward、--reward_model 等）原样传给 `rloom data check`。
"""

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rloom.cli.data import main
from rloom.data.files import read_rows
from rloom.data.rows import Columns, read_row
from rloom.errors import DataError


def prompt_lengths(file: str) -> list[int]:
    """每个 prompt 的字符数；无法读取的行不计入。"""
    rows = (read_row(values, Columns()) for values in read_rows(file))
    return [sum(len(message["content"]) for message in row.messages) for row in rows if row.messages is not None]


def check(file: str, tokenizer: str | None, options: list[str]) -> int:
    with_tokenizer = ["--tokenizer", tokenizer] if tokenizer else []
    print("== 1. 格式检查 ==", flush=True)
    status = main(["check", file, *with_tokenizer, *options])
    try:
        lengths = prompt_lengths(file)
    except DataError:
        return status  # 文件无法读取：上面已说明原因
    if lengths:
        print("\n== 2. prompt 长度（字符）==")
        print(f"最短 {min(lengths)}，中位数 {median(lengths):.0f}，最长 {max(lengths)}，共 {len(lengths)} 条")
    print("\n== 3. 样本 ==", flush=True)
    main(["show", file, "-n", "2", *with_tokenizer])
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="检查一个数据文件的质量。")
    parser.add_argument("file", help="parquet、json 或 jsonl 文件")
    parser.add_argument("--tokenizer", metavar="MODEL", help="模型目录或名称：按 token 统计长度")
    given, rest = parser.parse_known_args()
    sys.exit(check(given.file, given.tokenizer, rest))
