r"""GSM8K and MATH: word problems and competition problems.

A solution of GSM8K ends in a line `#### 72`. MATH's train rows are the train split of MATH, its test rows the 500
problems of MATH-500. They have an `answer` (the files of a --source folder, MATH-500) or a `solution` with a \boxed
answer (MATH on the hub).
"""

import logging
from pathlib import Path

from rloom.data.files import Row
from rloom.data.prepare.sources import RawFiles, RawRow, check_columns, read_split
from rloom.errors import DataError
from rloom.rewards.rules.boxed import last_boxed
from rloom.rewards.rules.gsm8k import ANSWER_MARK

log = logging.getLogger(__name__)

GSM8K = "openai/gsm8k"
GSM8K_FILES = {split: RawFiles(GSM8K, f"main/{split}-*.parquet", f"{split}.jsonl") for split in ("train", "test")}
GSM8K_INSTRUCTION = f'Think step by step, then give the final answer after "{ANSWER_MARK}".'


def gsm8k_splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    return _gsm8k_split("train", source), _gsm8k_split("test", source)


def _gsm8k_split(split: str, source: Path | None) -> list[Row]:
    return [_gsm8k_row(row, split) for row in read_split(GSM8K_FILES[split], source)]


def _gsm8k_row(row: RawRow, split: str) -> Row:
    check_columns(row, {"question": str, "answer": str}, "the original GSM8K files")
    question, answer = row.values["question"], row.values["answer"]
    if ANSWER_MARK not in answer:
        raise DataError(f"{row.place}: no {ANSWER_MARK} in the answer; pass the original GSM8K files as --source")
    return {
        "data_source": GSM8K,
        "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": after_mark(answer)},
        "extra_info": {"split": split, "index": row.index, "answer": answer, "question": question},
    }


def after_mark(solution: str) -> str:
    """'... #### 1,080' -> '1080'."""
    return solution.rsplit(ANSWER_MARK, 1)[1].strip().replace(",", "")


MATH_TRAIN = RawFiles("DigitalLearningGmbH/MATH-lighteval", "data/train-*.parquet", "train.json")
MATH_TEST = RawFiles("HuggingFaceH4/MATH-500", "test.jsonl", "test500.jsonl")
MATH_INSTRUCTION = r"Think step by step and put the final answer within \boxed{}."


def math_splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    return _math_split(MATH_TRAIN, "train", source), _math_split(MATH_TEST, "test", source)


def _math_split(files: RawFiles, split: str, source: Path | None) -> list[Row]:
    rows, kept = read_split(files, source), []
    for row in rows:
        check_columns(row, {"problem": str}, "the MATH files")
        answer = answer_of(row.values)
        if answer:
            kept.append(_math_row(row, answer, files.repository, split))
    if len(kept) < len(rows):
        # a few rows of the published files have no answer and cannot be scored
        log.warning("math: left out %d of %d %s rows that have no answer", len(rows) - len(kept), len(rows), split)
    return kept


def _math_row(row: RawRow, answer: str, data_source: str, split: str) -> Row:
    values = row.values
    extra_info = {
        "split": split,
        "index": row.index,
        "question": values["problem"],
        "answer": values.get("solution"),
        # these keys have two names in the copies of MATH
        "level": values.get("level", values.get("difficulty")),
        "subject": values.get("subject", values.get("type")),
    }
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{values['problem']} {MATH_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {key: value for key, value in extra_info.items() if value is not None},
    }


def answer_of(row: Row) -> str | None:
    answer = row.get("answer")
    if answer is None:
        answer = last_boxed(row.get("solution") or "")
    return None if answer is None else str(answer).strip()
