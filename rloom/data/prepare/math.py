r"""MATH: competition problems. Train: the train split of MATH. Test: the 500 problems of MATH-500.

Rows have an `answer` (the files of a --source folder, MATH-500) or a `solution` with a \boxed answer (MATH on the hub).
"""

import logging
from pathlib import Path

from rloom.data.files import Row, read_rows
from rloom.data.prepare import Splits, load_from_hub
from rloom.errors import DataError
from rloom.rewards.rules.boxed import last_boxed

log = logging.getLogger(__name__)

TRAIN_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
TEST_SOURCE = "HuggingFaceH4/MATH-500"
INSTRUCTION = r"Think step by step and put the final answer within \boxed{}."


def splits(source: Path | None) -> Splits:
    if source is None:
        train, test = load_from_hub(TRAIN_SOURCE, split="train"), load_from_hub(TEST_SOURCE, split="test")
    else:
        train, test = read_rows(source / "train.json"), read_rows(source / "test500.jsonl")
    return _split(train, TRAIN_SOURCE, "train"), _split(test, TEST_SOURCE, "test")


def _split(rows: list[Row], data_source: str, split: str) -> list[Row]:
    kept = []
    for index, row in enumerate(rows):
        if not isinstance(row.get("problem"), str):
            raise DataError(f"MATH {split}, row {index} (counting from 0): no problem; pass the MATH files as --source")
        answer = final_answer(row)
        if answer:
            kept.append(_row(row, answer, data_source, split, index))
    if len(kept) < len(rows):
        # a few rows of the published files have no answer and cannot be scored
        log.warning("math: left out %d of %d %s rows that have no answer", len(rows) - len(kept), len(rows), split)
    return kept


def _row(row: Row, answer: str, data_source: str, split: str, index: int) -> Row:
    extra_info = {
        "split": split,
        "index": index,
        "question": row["problem"],
        "answer": row.get("solution"),
        # these keys have two names in the copies of MATH
        "level": row.get("level", row.get("difficulty")),
        "subject": row.get("subject", row.get("type")),
    }
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{row['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {key: value for key, value in extra_info.items() if value is not None},
    }


def final_answer(row: Row) -> str | None:
    answer = row.get("answer")
    if answer is None:
        answer = last_boxed(row.get("solution") or "")
    return None if answer is None else str(answer).strip()
