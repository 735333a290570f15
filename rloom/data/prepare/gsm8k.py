"""GSM8K: grade-school word problems. Each solution ends in a line `#### 72`."""

from pathlib import Path

from rloom.data.files import Row
from rloom.data.prepare.sources import RawFiles, RawRow, check_columns, read_split
from rloom.errors import DataError
from rloom.rewards.rules.gsm8k import ANSWER_MARK

DATA_SOURCE = "openai/gsm8k"
FILES = {split: RawFiles(DATA_SOURCE, f"main/{split}-*.parquet", f"{split}.jsonl") for split in ("train", "test")}
INSTRUCTION = f'Think step by step, then give the final answer after "{ANSWER_MARK}".'


def splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    return _split("train", source), _split("test", source)


def _split(split: str, source: Path | None) -> list[Row]:
    return [_row(row, split) for row in read_split(FILES[split], source)]


def _row(row: RawRow, split: str) -> Row:
    check_columns(row, {"question": str, "answer": str}, "the original GSM8K files")
    question, answer = row.values["question"], row.values["answer"]
    if ANSWER_MARK not in answer:
        raise DataError(f"{row.place}: no {ANSWER_MARK} in the answer; pass the original GSM8K files as --source")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(answer)},
        "extra_info": {"split": split, "index": row.index, "answer": answer, "question": question},
    }


def final_answer(solution: str) -> str:
    """'... #### 1,080' -> '1080'."""
    return solution.rsplit(ANSWER_MARK, 1)[1].strip().replace(",", "")
