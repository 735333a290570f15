"""HumanEval: 164 functions to complete, with tests. The published set has no train split.

`test.parquet` has all problems. `train.parquet` has the same problems: a run needs train files, and a score on
problems that were trained on is no result. Train on MBPP and test on HumanEval instead.
"""

import json
from pathlib import Path

from rloom.data.files import Row, read_rows
from rloom.data.prepare import Splits, load_from_hub
from rloom.errors import DataError

DATA_SOURCE = "openai/openai_humaneval"
FILE = "HumanEval.jsonl.gz"
INSTRUCTION = "Complete this Python function. Answer with the whole function in a ```python block."
COLUMNS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


def splits(source: Path | None) -> Splits:
    if source is None:
        place, rows = f"{DATA_SOURCE} (test)", load_from_hub(DATA_SOURCE, split="test")
    else:
        file = source / FILE if source.is_dir() else source
        place, rows = str(file), read_rows(file)
    train, test = (
        [_row(f"{place}, row {index} (counting from 0)", row, split, index) for index, row in enumerate(rows)]
        for split in ("train", "test")
    )
    return train, test


def _row(place: str, row: Row, split: str, index: int) -> Row:
    missing = [key for key in COLUMNS if not isinstance(row.get(key), str)]
    if missing:
        raise DataError(f"{place}: no {' and no '.join(missing)}; pass the original {FILE} as --source")
    truth = {key: row[key] for key in ("entry_point", "test", "prompt")}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n```python\n{row['prompt'].strip()}\n```"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {
            "split": split,
            "index": index,
            "task_id": row["task_id"],
            "answer": row["canonical_solution"],
        },
    }
