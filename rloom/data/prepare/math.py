r"""MATH: competition problems. Train: the train split of MATH. Test: the 500 problems of MATH-500.

Rows have an `answer` (the files of a --source folder, MATH-500) or a `solution` with a \boxed answer (MATH on the hub).
"""

import logging
from pathlib import Path

from rloom.data.files import Row
from rloom.data.prepare.sources import RawFiles, RawRow, check_columns, read_split
from rloom.rewards.rules.boxed import last_boxed

log = logging.getLogger(__name__)

TRAIN = RawFiles("DigitalLearningGmbH/MATH-lighteval", "data/train-*.parquet", "train.json")
TEST = RawFiles("HuggingFaceH4/MATH-500", "test.jsonl", "test500.jsonl")
INSTRUCTION = r"Think step by step and put the final answer within \boxed{}."


def splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    return _split(TRAIN, "train", source), _split(TEST, "test", source)


def _split(files: RawFiles, split: str, source: Path | None) -> list[Row]:
    rows, kept = read_split(files, source), []
    for row in rows:
        check_columns(row, {"problem": str}, "the MATH files")
        answer = final_answer(row.values)
        if answer:
            kept.append(_row(row, answer, files.repository, split))
    if len(kept) < len(rows):
        # a few rows of the published files have no answer and cannot be scored
        log.warning("math: left out %d of %d %s rows that have no answer", len(rows) - len(kept), len(rows), split)
    return kept


def _row(row: RawRow, answer: str, data_source: str, split: str) -> Row:
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
        "prompt": [{"role": "user", "content": f"{values['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {key: value for key, value in extra_info.items() if value is not None},
    }


def final_answer(row: Row) -> str | None:
    answer = row.get("answer")
    if answer is None:
        answer = last_boxed(row.get("solution") or "")
    return None if answer is None else str(answer).strip()
