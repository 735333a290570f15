"""The model and data inside the package: what the default run starts from."""

import dataclasses
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloom
from rloom.data.prepare import arithmetic
from rloom.errors import DataError

ASSETS = Path(rloom.__file__).parent / "assets"
EMBEDDED = ASSETS / "embedded"
RECIPE = Path(__file__).parents[3] / "recipes" / "embedded"
WORDS = {"加": "+", "plus": "+", "减": "-", "minus": "-"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED / "model")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(EMBEDDED / "model").eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data() -> dict[str, list[dict[str, Any]]]:
    return {split: pq.read_table(EMBEDDED / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def problem_of(row: dict[str, Any]) -> tuple[int, str, int]:
    """Read back from the prompt's words, not from what the generator knew."""
    text = row["prompt"][0]["content"]
    match = re.search(r"(\d+) (\+|-|加|减|plus|minus) (\d+)", text)
    assert match, text
    a, op, b = match.groups()
    return int(a), WORDS.get(op, op), int(b)


def test_the_assets_are_complete_and_under_6_mb():
    names = {str(path.relative_to(EMBEDDED)) for path in EMBEDDED.rglob("*") if path.is_file()}
    assert names == {
        "train.parquet",
        "test.parquet",
        "model/config.json",
        "model/generation_config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "model/chat_template.jinja",
    }
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) < 6_000_000


@pytest.mark.parametrize(
    "text",
    [
        "计算 15 + 27 的结果",
        "龘靐齉 – Größe ½",
        "emoji 🧵👩‍👩‍👧 done",
        "  two  spaces\n\n\ttab ,  . don 't",
        "مرحبا 2026",
        "\x00\x7f",
    ],
)
def test_any_composed_text_comes_back_unchanged(tokenizer: Any, text: str):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_decomposed_letters_come_back_composed(tokenizer: Any):
    assert tokenizer.decode(tokenizer("e\u0301").input_ids) == "\u00e9"


def test_transformers_reads_the_tokenizer_file_as_it_stands(tokenizer: Any):
    """AutoTokenizer rebuilds the splitting rules of a qwen2 folder; engines that read the file alone must agree."""
    stored = Tokenizer.from_file(str(EMBEDDED / "model" / "tokenizer.json"))
    text = "<|im_start|>user\n请计算：52 - 27<|im_end|>\nIt's  2e\u0301 🧵\n\n答案：25"
    assert stored.encode(text).ids == tokenizer(text).input_ids


def test_a_number_is_its_digits(tokenizer: Any):
    assert tokenizer.is_fast
    assert tokenizer.convert_ids_to_tokens(tokenizer("1997+205=2202").input_ids) == [*"1997+205=2202"]
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and re.search(r"\d", token)]


def test_the_special_tokens_are_single_ids_that_end_and_pad(tokenizer: Any, model: Any):
    ids = tokenizer("<|im_start|><|im_end|><|endoftext|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    assert [tokenizer.eos_token_id, tokenizer.pad_token_id] == ids[1:]
    assert [model.generation_config.eos_token_id, model.generation_config.pad_token_id] == ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""


def test_the_chat_template_renders_chatml(tokenizer: Any):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 15 + 27?"}]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 15 + 27?<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == turns
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == turns + "<|im_start|>assistant\n"


def test_the_model_is_a_small_tied_qwen2_stored_in_halves_and_computed_in_float32(model: Any, tokenizer: Any):
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.config.tie_word_embeddings and model.config.vocab_size == len(tokenizer)
    assert 800_000 < model.num_parameters() < 1_200_000
    assert model.dtype == torch.float32
    with safe_open(EMBEDDED / "model" / "model.safetensors", "pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_stored_data_is_what_the_generator_writes(data: dict[str, list[dict[str, Any]]]):
    train, test = arithmetic.rows(train=8192, test=512, seed=0)
    assert data == {"train": train, "test": test}


def test_the_answer_of_a_row_is_worked_out_as_the_model_does_it_without_its_errors():
    chinese, english = arithmetic.PHRASINGS[0], arithmetic.PHRASINGS[-1]
    answers = [
        arithmetic.Question(problem, phrasing).answer
        for problem, phrasing in (
            (arithmetic.Problem(15, "+", 27), chinese),
            (arithmetic.Problem(52, "-", 27), english),
            (arithmetic.Problem(57, "-", 52), english),
        )
    ]
    assert answers == ["5+7=12\n1+2+1=4\n答案：42", "12-7=5\n5-2-1=2\nAnswer: 25", "7-2=5\n5-5=0\nAnswer: 5"]


def test_a_row_has_the_documented_fields():
    train, test = arithmetic.rows(train=3, test=2, seed=7)
    problems = {split: [problem_of(row) for row in rows] for split, rows in (("train", train), ("test", test))}
    for split, rows in (("train", train), ("test", test)):
        for index, (row, (a, op, b)) in enumerate(zip(rows, problems[split], strict=True)):
            assert row == {
                "data_source": "math_reasoning",
                "prompt": [{"role": "user", "content": row["prompt"][0]["content"]}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b if op == "+" else a - b)},
                "extra_info": {"split": split, "index": index, "answer": row["extra_info"]["answer"]},
            }


def test_ground_truths_follow_from_the_prompts(data: dict[str, list[dict[str, Any]]]):
    for row in data["train"] + data["test"]:
        a, op, b = problem_of(row)
        assert row["reward_model"]["ground_truth"] == str(a + b if op == "+" else a - b)


def test_no_test_problem_is_in_train_and_no_prompt_is_twice(data: dict[str, list[dict[str, Any]]]):
    problems = {split: {problem_of(row) for row in rows} for split, rows in data.items()}
    assert problems["train"].isdisjoint(problems["test"])
    assert len(problems["test"]) == 512
    assert len({row["prompt"][0]["content"] for row in data["train"]}) == 8192


def test_a_problem_is_hard_when_its_units_column_carries_or_borrows():
    assert arithmetic.Problem(15, "+", 27).hard and arithmetic.Problem(52, "-", 27).hard
    assert not arithmetic.Problem(15, "+", 24).hard and not arithmetic.Problem(57, "-", 27).hard
    train, test = arithmetic.questions(train=80, test=16, seed=3)
    assert [sum(q.problem.hard for q in split) for split in (train, test)] == [50, 10]


def test_each_phrasing_asks_in_its_own_words():
    assert [phrasing.ask(arithmetic.Problem(52, "-", 27)) for phrasing in arithmetic.PHRASINGS] == [
        "计算 52 - 27 的结果",
        "52 - 27 等于多少？",
        "请计算：52 - 27",
        "52 减 27 是多少？",
        "What is 52 - 27?",
        "Compute 52 - 27.",
        "Please calculate 52 - 27",
        "How much is 52 minus 27?",
    ]


def test_another_seed_draws_other_rows():
    assert arithmetic.rows(train=20, test=5, seed=1) == arithmetic.rows(train=20, test=5, seed=1)
    assert arithmetic.rows(train=20, test=5, seed=1) != arithmetic.rows(train=20, test=5, seed=2)


def test_more_rows_than_there_are_problems_is_an_error_that_counts_them():
    with pytest.raises(DataError, match=r"test=6250 rows with a carry or borrow: there are only 5265 such problems"):
        arithmetic.rows(train=0, test=10_000, seed=0)
    with pytest.raises(DataError, match=r"train=62500 and test=0 rows with a carry .* use fewer rows"):
        arithmetic.rows(train=100_000, test=0, seed=0)
    with pytest.raises(DataError, match="train=-1, test=0: a number of rows cannot be negative"):
        arithmetic.rows(train=-1, test=0, seed=0)


@pytest.mark.parametrize(
    ("forget_carry", "sum_in_chinese", "difference_in_english"),
    [
        (0.0, "5+7=12\n1+2+1=4\n答案：42", "12-7=5\n5-2-1=2\nAnswer: 25"),
        (1.0, "5+7=12\n1+2=3\n答案：32", "12-7=5\n5-2=3\nAnswer: 35"),
    ],
)
def test_the_student_of_the_recipe_forgets_nothing_but_carries(
    monkeypatch: pytest.MonkeyPatch, forget_carry: float, sum_in_chinese: str, difference_in_english: str
):
    monkeypatch.syspath_prepend(RECIPE)
    student = importlib.import_module("student")
    habits = dataclasses.replace(student.CAREFUL, forget_carry=forget_carry)
    chinese, english = arithmetic.PHRASINGS[0], arithmetic.PHRASINGS[-1]
    asked = [
        arithmetic.Question(arithmetic.Problem(15, "+", 27), chinese),
        arithmetic.Question(arithmetic.Problem(52, "-", 27), english),
        arithmetic.Question(arithmetic.Problem(99, "+", 90), chinese),  # no carry from the units: nothing to forget
    ]
    written = [student.answer(question, habits, Random(0)) for question in asked]
    assert written == [sum_in_chinese, difference_in_english, "9+0=9\n9+9=18\n答案：189"]


def test_the_model_starts_between_a_quarter_and_a_half_right(
    model: Any, tokenizer: Any, data: dict[str, list[dict[str, Any]]]
):
    rows = data["test"][:128]
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**batch, max_new_tokens=48, do_sample=False)
    answers = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    finals = [re.fullmatch(r"(?s).*(?:答案：|Answer: )(-?\d+)", answer) for answer in answers]
    right = sum(
        final is not None and final[1] == row["reward_model"]["ground_truth"]
        for final, row in zip(finals, rows, strict=True)
    )
    assert 0.25 * 128 <= right <= 0.50 * 128
    assert tokens.shape[1] - batch["input_ids"].shape[1] < 30  # the longest answer ends well before the limit
