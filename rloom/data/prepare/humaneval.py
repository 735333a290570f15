"""HumanEval: 164 functions to complete, with tests. The published set has no train split.

`test.parquet` has all problems. `train.parquet` has the same problems: a run needs train files, and a score on
problems that were trained on is no result. Train on MBPP and test on HumanEval instead.
"""

import json
from pathlib import Path

from rloom.data.files import Row
from rloom.data.prepare.sources import RawFiles, RawRow, check_columns, read_split

DATA_SOURCE = "openai/openai_humaneval"
FILES = RawFiles(DATA_SOURCE, "openai_humaneval/test-*.parquet", "HumanEval.jsonl.gz", single=True)
INSTRUCTION = "Complete this Python function. Answer with the whole function in a ```python block."
COLUMNS = dict.fromkeys(("task_id", "prompt", "entry_point", "canonical_solution", "test"), str)


def splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    rows = read_split(FILES, source)
    return [_row(row, "train") for row in rows], [_row(row, "test") for row in rows]


def _row(row: RawRow, split: str) -> Row:
    check_columns(row, COLUMNS, f"the original {FILES.original}")
    values = row.values
    truth = {key: values[key] for key in ("entry_point", "test", "prompt")}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n```python\n{values['prompt'].strip()}\n```"}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {
            "split": split,
            "index": row.index,
            "task_id": values["task_id"],
            "answer": values["canonical_solution"],
        },
    }
