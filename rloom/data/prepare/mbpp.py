"""MBPP: 974 short Python functions with three tests each, split by task id as published.

1 to 10: examples for few-shot prompts, left out. 11 to 510: test. 511 to 600: validation, left out. 601 to 974: train.
"""

import json
from pathlib import Path

from rloom.data.files import Row
from rloom.data.prepare.sources import RawFiles, check_columns, read_split
from rloom.errors import DataError

DATA_SOURCE = "mbpp"
FILES = RawFiles("google-research-datasets/mbpp", "full/t*-*.parquet", "mbpp.jsonl", single=True)  # train and test
COLUMNS = {"text": str, "code": str, "task_id": int, "test_list": list}
TRAIN_IDS, TEST_IDS = range(601, 975), range(11, 511)
INSTRUCTION = "Answer with a Python function in a ```python block. It has to pass these tests:"


def splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    rows = read_split(FILES, source)
    for row in rows:
        check_columns(row, COLUMNS, f"the original {FILES.original}")
    train = [_row(row.values, "train") for row in rows if row.values["task_id"] in TRAIN_IDS]
    test = [_row(row.values, "test") for row in rows if row.values["task_id"] in TEST_IDS]
    if not train or not test:
        place = FILES.repository if source is None else f"--source {source}"
        raise DataError(f"{place}: has no rows of the train split (task_id 601 to 974) or the test split (11 to 510)")
    return train, test


def _row(row: Row, split: str) -> Row:
    tests = "\n".join(row["test_list"])
    truth = {"test_list": row["test_list"], "test_setup_code": row.get("test_setup_code") or ""}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{row['text']} {INSTRUCTION}\n\n```python\n{tests}\n```"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"split": split, "index": row["task_id"], "task_id": row["task_id"], "answer": row["code"]},
    }
