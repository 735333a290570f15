"""Small models and data under the names that the documents print, so that the real loading code finds them offline.

The models are in a cache of huggingface_hub, the data sets are written by `rloom data prepare` from a few rows.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GemmaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen2Config

from rloom.data.prepare import prepare
from rloom.models.source import EMBEDDED_FOLDER
from tests.classifiers import SPECIAL, TEMPLATE, deberta_config, llama_config, save_classifier
from tests.helpers import SHAPE, tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = range(8)  # the answer to a row is 0 or 1: half of the answers of a random model that have one are right
FORMS = ("a{} #### {}\n", r"b{} \boxed{{{}}}")
ANSWERS = [form.format(number, answer) for form in FORMS for number in range(4) for answer in (0, 1)]
LONGER = {**SHAPE, "max_position_embeddings": 512, "initializer_range": 0.02}


def save_policy(folder: Path, config: PreTrainedConfig) -> None:
    """A random model. Whole answers are tokens: of 32 random ones, several are answers of each form."""
    words = [*SPECIAL, *ANSWERS, *(f"w{number}" for number in range(SHAPE["vocab_size"] - len(SPECIAL) - len(ANSWERS)))]
    inner = Tokenizer(WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_model(config).save_pretrained(folder)


def save_qwen(folder: Path) -> None:
    save_policy(folder, Qwen2Config(**LONGER))


def save_solver(folder: Path) -> None:
    """For the command that trains on rloom's own data: the model that solves some of them has the layers of Qwen2."""
    shutil.copytree(EMBEDDED_FOLDER / "model", folder, dirs_exist_ok=True)


def save_gemma(folder: Path) -> None:
    save_policy(folder, GemmaConfig(**LONGER, head_dim=16))


def save_deberta(folder: Path) -> None:
    save_classifier(folder, deberta_config(), chat=False)


def save_llama_classifier(folder: Path) -> None:
    save_classifier(folder, llama_config(max_position_embeddings=512))


MODELS: Mapping[str, Callable[[Path], None]] = {
    "google/gemma-2b-it": save_gemma,
    "Qwen/Qwen2.5-0.5B-Instruct": save_qwen,
    "Qwen/Qwen2.5-7B": save_solver,
    "Qwen/Qwen2.5-7B-Instruct": save_qwen,
    "Qwen/Qwen2-7B-Instruct": save_qwen,
    "Qwen/Qwen2-72B-Instruct": save_qwen,
    "OpenAssistant/reward-model-deberta-v3-large": save_deberta,
    "sfairXC/FsfairX-LLaMA3-RM-v0.1": save_llama_classifier,
    "RLHFlow/ArmoRM-Llama3-8B-v0.1": save_llama_classifier,
}


def snapshot(hf_home: Path, name: str) -> Path:
    return hf_home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT


def save_models(hf_home: Path) -> None:
    for name, save in MODELS.items():
        folder = snapshot(hf_home, name)
        folder.mkdir(parents=True)
        save(folder)
        main = folder.parents[1] / "refs" / "main"
        main.parent.mkdir()
        main.write_text(COMMIT)


def save_data(home: Path) -> None:
    """As the documents' preparation scripts do, into ~/data."""
    gsm8k = [{"question": f"{row} modulo 2 = ?", "answer": f"Divide.\n#### {row % 2}"} for row in ROWS]
    math = [{"problem": f"{row} modulo 2 = ?", "answer": str(row % 2)} for row in ROWS]
    asked = [f"\n\nHuman: Is {row} an odd number?\n\nAssistant:" for row in ROWS]
    dialogues = [{"chosen": f"{prompt} Yes.", "rejected": f"{prompt} No."} for prompt in asked]
    files = {
        "gsm8k": (gsm8k, "train.jsonl", "test.jsonl"),
        "math": (math, "train.json", "test.jsonl"),
        "hh_rlhf": (dialogues, "helpful_train.jsonl", "helpful_test.jsonl"),
    }
    for name, (rows, train, test) in files.items():
        source = home / "sources" / name
        source.mkdir(parents=True)
        for file, kept in ((train, rows), (test, rows[:2])):
            lines = "".join(f"{json.dumps(row)}\n" for row in kept)
            (source / file).write_text(lines if file.endswith("l") else json.dumps(kept))
        prepare(name, home / "data" / name, source)
