"""HumanEval and MBPP: Python functions with tests.

HumanEval has 164 functions to complete; the published set has no train split. `test.parquet` has all problems.
`train.parquet` has the same problems: a run needs train files, and a score on problems that were trained on is no
result. Train on MBPP and test on HumanEval instead.

MBPP has 974 short functions with three tests each, split by task id as published. 1 to 10: examples for few-shot
prompts, left out. 11 to 510: test. 511 to 600: validation, left out. 601 to 974: train.
"""

import json
from pathlib import Path

from rloom.data.files import Row
from rloom.data.prepare.sources import RawFiles, RawRow, check_columns, read_split
from rloom.errors import DataError

HUMANEVAL = "openai/openai_humaneval"
HUMANEVAL_FILES = RawFiles(HUMANEVAL, "openai_humaneval/test-*.parquet", "HumanEval.jsonl.gz", single=True)
COMPLETE = "Complete this Python function. Answer with the whole function in a ```python block."
HUMANEVAL_COLUMNS = dict.fromkeys(("task_id", "prompt", "entry_point", "canonical_solution", "test"), str)


def humaneval_splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    rows = read_split(HUMANEVAL_FILES, source)
    return [_humaneval_row(row, "train") for row in rows], [_humaneval_row(row, "test") for row in rows]


def _humaneval_row(row: RawRow, split: str) -> Row:
    check_columns(row, HUMANEVAL_COLUMNS, f"the original {HUMANEVAL_FILES.original}")
    values = row.values
    truth = {key: values[key] for key in ("entry_point", "test", "prompt")}
    return {
        "data_source": HUMANEVAL,
        "prompt": [{"role": "user", "content": f"{COMPLETE}\n\n```python\n{values['prompt'].strip()}\n```"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {
            "split": split,
            "index": row.index,
            "task_id": values["task_id"],
            "answer": values["canonical_solution"],
        },
    }


MBPP = "mbpp"
MBPP_FILES = RawFiles("google-research-datasets/mbpp", "full/t*-*.parquet", "mbpp.jsonl", single=True)  # train and test
MBPP_COLUMNS = {"text": str, "code": str, "task_id": int, "test_list": list}
TRAIN_IDS, TEST_IDS = range(601, 975), range(11, 511)
WRITE = "Answer with a Python function in a ```python block. It has to pass these tests:"


def mbpp_splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    rows = read_split(MBPP_FILES, source)
    for row in rows:
        check_columns(row, MBPP_COLUMNS, f"the original {MBPP_FILES.original}")
    train = [_mbpp_row(row.values, "train") for row in rows if row.values["task_id"] in TRAIN_IDS]
    test = [_mbpp_row(row.values, "test") for row in rows if row.values["task_id"] in TEST_IDS]
    if not train or not test:
        place = MBPP_FILES.repository if source is None else f"--source {source}"
        raise DataError(f"{place}: has no rows of the train split (task_id 601 to 974) or the test split (11 to 510)")
    return train, test


def _mbpp_row(row: Row, split: str) -> Row:
    tests = "\n".join(row["test_list"])
    truth = {"test_list": row["test_list"], "test_setup_code": row.get("test_setup_code") or ""}
    return {
        "data_source": MBPP,
        "prompt": [{"role": "user", "content": f"{row['text']} {WRITE}\n\n```python\n{tests}\n```"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"split": split, "index": row["task_id"], "task_id": row["task_id"], "answer": row["code"]},
    }
