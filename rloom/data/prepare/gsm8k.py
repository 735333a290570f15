"""GSM8K: grade-school word problems. Each solution ends in a line `#### 72`."""

from pathlib import Path

from rloom.data.files import Row, read_rows
from rloom.data.prepare import Splits, load_from_hub
from rloom.errors import DataError
from rloom.rewards.rules.gsm8k import ANSWER_MARK

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = f'Think step by step, then give the final answer after "{ANSWER_MARK}".'


def splits(source: Path | None) -> Splits:
    return _split("train", source), _split("test", source)


def _split(split: str, source: Path | None) -> list[Row]:
    if source is None:
        place, rows = f"{DATA_SOURCE} ({split})", load_from_hub(DATA_SOURCE, subset="main", split=split)
    else:
        place, rows = str(source / f"{split}.jsonl"), read_rows(source / f"{split}.jsonl")
    return [_row(f"{place}, row {index} (counting from 0)", row, split, index) for index, row in enumerate(rows)]


def _row(place: str, row: Row, split: str, index: int) -> Row:
    missing = [key for key in ("question", "answer") if not isinstance(row.get(key), str)]
    if missing or ANSWER_MARK not in row["answer"]:
        fault = f"no {' and no '.join(missing)}" if missing else f"no {ANSWER_MARK} in the answer"
        raise DataError(f"{place}: {fault}; pass the original GSM8K files as --source")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(row["answer"])},
        "extra_info": {"split": split, "index": index, "answer": row["answer"], "question": row["question"]},
    }


def final_answer(solution: str) -> str:
    """'... #### 1,080' -> '1080'."""
    return solution.rsplit(ANSWER_MARK, 1)[1].strip().replace(",", "")
