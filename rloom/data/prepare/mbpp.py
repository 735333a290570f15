"""MBPP: 974 short Python functions with three tests each, split by task id as published.

1 to 10: examples for few-shot prompts, left out. 11 to 510: test. 511 to 600: validation, left out. 601 to 974: train.
"""

import json
from pathlib import Path

from rloom.data.files import Row, read_rows
from rloom.data.prepare import Splits, load_from_hub
from rloom.errors import DataError

DATA_SOURCE = "mbpp"
REPOSITORY = "google-research-datasets/mbpp"
FILE = "mbpp.jsonl"
TRAIN_IDS, TEST_IDS = range(601, 975), range(11, 511)
INSTRUCTION = "Answer with a Python function in a ```python block. It has to pass these tests:"


def splits(source: Path | None) -> Splits:
    if source is None:
        place, rows = REPOSITORY, [row for split in ("train", "test") for row in _from_hub(split)]
    else:
        file = source / FILE if source.is_dir() else source
        place, rows = str(file), read_rows(file)
    checked = [_checked(f"{place}, row {index} (counting from 0)", row) for index, row in enumerate(rows)]
    train = [_row(row, "train") for row in checked if row["task_id"] in TRAIN_IDS]
    test = [_row(row, "test") for row in checked if row["task_id"] in TEST_IDS]
    if not train or not test:
        raise DataError(f"{place}: has no rows of the train split (task_id 601 to 974) or the test split (11 to 510)")
    return train, test


def _from_hub(split: str) -> list[Row]:
    return load_from_hub(REPOSITORY, subset="full", split=split)


def _checked(place: str, row: Row) -> Row:
    missing = [key for key in ("text", "code") if not isinstance(row.get(key), str)]
    missing += [key for key, kind in (("task_id", int), ("test_list", list)) if not isinstance(row.get(key), kind)]
    if missing:
        raise DataError(f"{place}: no {' and no '.join(missing)}; pass the original {FILE} as --source")
    return row


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
