"""Rebuild the embedded model and data: `python recipes/embedded/make.py [--out DIR] [--seed 0]`. See README.md."""

import argparse
import json
from pathlib import Path
from random import Random

import chat_tokenizer
import measure
import pyarrow as pa
import pyarrow.parquet as pq
import sft
import torch
from student import CAREFUL, Habits, answer
from transformers import GenerationConfig, Qwen2ForCausalLM, Qwen2Tokenizer

from rloom.data.prepare import arithmetic

TRAIN_ROWS, TEST_ROWS = 8192, 512
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "rloom" / "assets" / "embedded"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    write_data(options.out, options.seed)
    train, test = arithmetic.questions(train=TRAIN_ROWS, test=TEST_ROWS, seed=options.seed)
    tokenizer = chat_tokenizer.train(tokenizer_corpus(train, options.seed))
    model = sft.new_model(tokenizer, chat_tokenizer.CONTEXT)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters")
    sft.train(model, tokenizer, train, Habits(), sft.Schedule(), options.seed)
    save(model, tokenizer, options.out / "model")

    model = Qwen2ForCausalLM.from_pretrained(options.out / "model")  # what was stored is what gets measured
    print("greedy: ", measure.accuracy(model, tokenizer, test, sample=False))
    print("sampled:", measure.accuracy(model, tokenizer, test * 4, sample=True))


def write_data(out: Path, seed: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    train, test = arithmetic.rows(train=TRAIN_ROWS, test=TEST_ROWS, seed=seed)
    for name, split in (("train", train), ("test", test)):
        pq.write_table(pa.Table.from_pylist(split), out / f"{name}.parquet", compression="zstd")


def tokenizer_corpus(questions: list[arithmetic.Question], seed: int) -> list[str]:
    """The words of prompts and answers, and the template's role names, so that each becomes one token."""
    random = Random(seed)
    roles = ["system", "user", "assistant"] * len(questions)
    return roles + [text for q in questions for text in (q.text, answer(q, CAREFUL, random))]


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """bfloat16 halves the file; the config asks for float32, which is what a CPU computes fastest."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    tokenizer.save_pretrained(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")


if __name__ == "__main__":
    main()
