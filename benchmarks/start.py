"""Seconds and memory until the prompts of a run are ready: the first time, and again from the cache.

    python -m benchmarks.start --rows 100000 --format jsonl

The rows have about 270 tokens with the embedded tokenizer. Each start is a process of its own.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = ("the", "sum", "of", "two", "numbers", "a", "train", "leaves", "at", "noon", "and", "needs", "its", "station")


def row(number: int) -> dict[str, object]:
    draws = random.Random(number)
    question = " ".join(draws.choice(WORDS) if draws.random() < 0.8 else str(draws.randrange(100)) for _ in range(60))
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number}: {question}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(draws.randrange(1000))},
        "extra_info": {"split": "train", "index": number},
    }


def write(file: Path, rows: int) -> None:
    if file.suffix == ".jsonl":
        with file.open("w") as stream:
            stream.writelines(json.dumps(row(number)) + "\n" for number in range(rows))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.Table.from_pylist([row(0)]).schema
    with pq.ParquetWriter(file, schema) as writer:
        for start in range(0, rows, 10_000):
            chunk = [row(number) for number in range(start, min(start + 10_000, rows))]
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))


def start(file: Path) -> None:
    """In a process of its own: what a run does with its rows before it loads a model, and one batch."""
    from rloom.config.load import load_config
    from rloom.data.stream import PromptStream
    from rloom.launch.identity import prompts_record
    from rloom.launch.inputs import UserObjects, read_data, read_inputs

    config = load_config(
        [f"data.train_files={file}", "data.val_files=null", "data.max_prompt_length=1024", "trainer.device=cpu"]
    )
    began = time.perf_counter()
    data = read_data(config, UserObjects())
    content = data.content
    inputs = read_inputs(config, data)
    record = prompts_record(inputs.prompts)
    stream = PromptStream(inputs.prompts, batch_size=512, shuffle=True, seed=1)
    ready = time.perf_counter() - began
    batch = stream.next()
    found = {
        "ready_s": round(ready, 2),
        "batch_s": round(time.perf_counter() - began - ready, 3),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "tokens": sum(len(prompt.tokens) for prompt in batch) / len(batch),
        "digest": content[:8] + record["content"][:8],
    }
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--file", type=Path, help="start with this file, in this process")
    given = parser.parse_args()
    if given.file is not None:
        start(given.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"rows.{given.format}"
        write(file, given.rows)
        environment = os.environ | {"RLOOM_CACHE": str(Path(folder) / "cache")}
        for _ in range(given.starts):
            subprocess.run([sys.executable, "-m", "benchmarks.start", "--file", str(file)], env=environment, check=True)


if __name__ == "__main__":
    main()
