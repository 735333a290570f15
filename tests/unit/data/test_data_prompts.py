import copy
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from rloom.data.prompts import load_prompts, read_prompt_rows
from rloom.data.rows import Columns, data_source_of, ground_truth_of, rows_digest
from rloom.errors import ConfigError, DataError
from rloom.types import Prompt

CHARACTERS = "?><0123456789abcdefghijklmnopqrstuvwxyz"


def ids(text: str) -> tuple[int, ...]:
    return tuple(CHARACTERS.index(character) for character in text)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a character; a conversation is `>content` for each message, then `<`."""
    fast = FastTokenizer(WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="?"))
    fast.pre_tokenizer = Split(Regex("."), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="?")
    made.chat_template = "{% for m in messages %}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<{% endif %}"
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    return str(path)


def row(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"data_source": "test", "prompt": prompt, **more}


def load(files: str | list[str], tokenizer: Any, **changed: Any) -> list[Prompt]:
    settings: dict[str, Any] = {
        "columns": Columns(),
        "max_prompt_length": 8,
        "filter_overlong": False,
        "truncation": "error",
        "max_samples": None,
        "num_workers": 0,
        "return_raw_chat": False,
    }
    settings |= changed
    read = {name: settings.pop(name) for name in ("columns", "max_samples")}
    read |= {"field": settings["field"]} if "field" in settings else {}
    rows = read_prompt_rows(files, **read)
    return list(load_prompts(rows, tokenizer=tokenizer, prompt_key=read["columns"].prompt_key, **settings))


def with_template(tokenizer: Any, template: str) -> Any:
    found = copy.copy(tokenizer)
    found.chat_template = template
    return found


def fault(files: str | list[str], tokenizer: Any, **changed: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(files, tokenizer, **changed)
    return str(caught.value)


def test_a_row_of_the_documented_layout_becomes_a_prompt(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0},
        }
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load(str(tmp_path / "a.parquet"), tokenizer) == [
        Prompt(
            index=0,
            messages=({"role": "system", "content": "s"}, {"role": "user", "content": "ab"}),
            text=">s>ab<",
            tokens=ids(">s>ab<"),
            data_source="openai/gsm8k",
            ground_truth="72",
            extra_info={"split": "train", "index": 0},
            columns=rows[0],
        )
    ]


def test_the_kits_plain_row_becomes_a_prompt(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("ab", ground_truth="42")])
    (prompt,) = load(file, tokenizer)
    assert (prompt.text, prompt.ground_truth, prompt.extra_info) == (">ab<", "42", {})
    assert prompt.messages == ({"role": "user", "content": "ab"},)


def test_a_prompt_has_the_columns_of_its_row_and_its_prompt_as_written(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [{"data_source": "own", "question": "ab", "solution": "7", "tags": ["x"]}])
    (prompt,) = load(file, tokenizer, columns=Columns(prompt_key="question"))
    expected = {"data_source": "own", "question": "ab", "solution": "7", "tags": ["x"], "prompt": "ab"}
    assert prompt.columns == expected


def test_a_row_may_lack_a_ground_truth(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a", reward_model={"style": "model"}), row("b", reward_model=None)])
    assert [prompt.ground_truth for prompt in load(file, tokenizer)] == [None, None]


def test_files_are_joined_under_running_indices(tmp_path: Path, tokenizer: Any) -> None:
    first = write(tmp_path / "a.json", [row("a"), row("b")])
    second = write(tmp_path / "b.json", [row("c")])
    assert [(p.index, p.text) for p in load([first, second], tokenizer)] == [(0, ">a<"), (1, ">b<"), (2, ">c<")]


def test_other_keys_can_be_told(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [{"question": "a", "origin": "there"}])
    (prompt,) = load(file, tokenizer, columns=Columns("question", "origin"))
    assert (prompt.text, prompt.data_source) == (">a<", "there")


def test_max_samples_takes_the_head_before_filtering(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a"), row("much2long"), row("c"), row("d")])
    kept = load(file, tokenizer, max_samples=3, filter_overlong=True)
    assert [(p.index, p.text) for p in kept] == [(0, ">a<"), (2, ">c<")]
    assert len(load(file, tokenizer, max_samples=-1, truncation="left")) == 4
    assert len(load(file, tokenizer, max_samples=99, truncation="left")) == 4
    two = load([write(tmp_path / "b.json", [row("a"), row("b")]), file], tokenizer, max_samples=3)
    assert [(p.index, p.text) for p in two] == [(0, ">a<"), (1, ">b<"), (2, ">a<")]


def test_max_samples_of_nothing_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a")])
    with pytest.raises(ConfigError, match=r"data\.val_max_samples=0"):
        load(file, tokenizer, max_samples=0, field="data.val_files")


def test_raw_chat_reaches_the_reward(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a", extra_info={"index": 5})])
    (prompt,) = load(file, tokenizer, return_raw_chat=True)
    assert prompt.extra_info == {"index": 5, "raw_prompt": [{"role": "user", "content": "a"}]}


def test_a_custom_template_is_used(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a")])
    (prompt,) = load(file, with_template(tokenizer, "{{ messages[0].content }}0"))
    assert (prompt.text, prompt.tokens) == ("a0", ids("a0"))


@pytest.mark.parametrize(("truncation", "kept"), [("left", "3456789<"), ("right", ">0123456"), ("middle", ">012789<")])
def test_truncation_leaves_exactly_the_longest_length(
    tmp_path: Path, tokenizer: Any, truncation: str, kept: str
) -> None:
    file = write(tmp_path / "a.json", [row("0123456789"), row("ab")])
    long, short = load(file, tokenizer, truncation=truncation)
    assert long.tokens == ids(kept)
    assert long.text == ">0123456789<"
    assert short.tokens == ids(">ab<")


def test_the_middle_of_an_odd_length_keeps_one_more_of_the_tail(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("0123456789")])
    assert load(file, tokenizer, truncation="middle", max_prompt_length=5)[0].tokens == ids(">089<")
    assert load(file, tokenizer, truncation="middle", max_prompt_length=1)[0].tokens == ids("<")


def test_an_overlong_prompt_names_row_length_limit_and_ways_out(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a"), row("1234567"), row("b"), row("0123456789")])
    assert fault(file, tokenizer) == (
        f"data.train_files: {file}, row 1 (counting from 0): the prompt has 9 tokens, over data.max_prompt_length=8 "
        "(2 of 4 prompts are, the longest has 12). Raise data.max_prompt_length, set "
        "data.filter_overlong_prompts=True, or data.truncation to left, right or middle"
    )


def test_filtering_says_how_many_of_how_many(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "a.json", [row("123456"), row("1234567"), row("a")])
    with caplog.at_level(logging.INFO, logger="rloom.data.prompts"):
        kept = load(file, tokenizer, filter_overlong=True)
    assert [p.index for p in kept] == [0, 2]  # eight tokens are allowed
    assert caplog.messages == ["data.train_files: filtered out 1 of 3 prompts, longer than 8 tokens"]


def test_filtering_everything_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("123456789"), row("1234567")])
    message = fault(file, tokenizer, filter_overlong=True)
    assert "all 2 prompts are over data.max_prompt_length=8" in message
    assert "the shortest has 9" in message


def test_a_missing_key_names_file_row_key_and_columns(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a"), {"data_source": "test", "question": "b"}])
    assert fault(file, tokenizer, field="data.val_files") == (
        f"data.val_files: {file}, row 1 (counting from 0): has nothing under 'prompt'; its columns are 'data_source', "
        "'question'. Set data.prompt_key to the right one"
    )
    file = write(tmp_path / "b.json", [{"prompt": "a", "data_source": None}])
    assert "row 0 (counting from 0): has nothing under 'data_source'" in fault(file, tokenizer)


def test_rows_are_numbered_within_their_file(tmp_path: Path, tokenizer: Any) -> None:
    first = write(tmp_path / "a.json", [row("a"), row("b")])
    second = write(tmp_path / "b.json", [row("c"), row([])])
    assert f"{second}, row 1 (counting from 0): the prompt is an empty list" in fault([first, second], tokenizer)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (row(7), "the prompt is int"),
        (row([{"role": "user"}]), "message 0 of the prompt has no content"),
        (row("a", reward_model="72"), "'reward_model' is str; it must be an object"),
        (row("a", extra_info=[1]), "'extra_info' is list; it must be an object"),
        ({"prompt": "a", "data_source": 3}, "'data_source' is 3; it must be the name of a data source"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, tokenizer: Any, broken: dict[str, Any], reason: str) -> None:
    file = write(tmp_path / "a.json", [row("a"), broken])
    assert f"{file}, row 1 (counting from 0): {reason}" in fault(file, tokenizer)


def test_a_prompt_without_tokens_is_named(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("a")])
    empty = with_template(tokenizer, "{{ '' }}")
    assert "row 0 (counting from 0): the tokenizer makes no token" in fault(file, empty)


def test_faults_of_a_file_name_the_setting(tmp_path: Path, tokenizer: Any) -> None:
    missing = str(tmp_path / "none.json")
    assert fault(missing, tokenizer).startswith(f"data.train_files: {missing}: no such file")
    assert "holds no rows" in fault(write(tmp_path / "a.json", []), tokenizer)
    with pytest.raises(ConfigError, match=r"data\.train_files=\[\]"):
        load([], tokenizer)


def test_threads_give_the_same_prompts(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row(str(number), ground_truth=number) for number in range(1000)])
    threaded = load(file, tokenizer, num_workers=3)
    assert threaded == load(file, tokenizer)
    assert threaded[999].tokens == ids(">999<")


def test_a_truncation_stored_with_the_tokenizer_is_not_applied(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.json", [row("abcd") for _ in range(1000)])
    for num_workers in (0, 3):
        tokenizer.backend_tokenizer.enable_truncation(2)
        assert {prompt.tokens for prompt in load(file, tokenizer, num_workers=num_workers)} == {ids(">abcd<")}


def test_threads_give_the_same_error(tmp_path: Path, tokenizer: Any) -> None:
    rows = [row(str(number)) for number in range(1000)]
    rows[300] = row([])
    rows[900] = row(7)
    file = write(tmp_path / "a.json", rows)
    assert fault(file, tokenizer, num_workers=3) == fault(file, tokenizer)
    assert "row 300 " in fault(file, tokenizer)


def test_labels_come_from_a_column_and_rows_without_a_source_get_the_default() -> None:
    row = {"prompt": "2 + 3?", "answer": "5", "ground_truth": "9"}
    assert (ground_truth_of(row), ground_truth_of(row, "answer")) == ("9", "5")
    with pytest.raises(DataError, match=r"nothing under 'solution'; its columns are .* Set data.label_key"):
        ground_truth_of(row, "solution")
    assert data_source_of(row, "data_source", "default") == "default"
    assert data_source_of({**row, "data_source": "mine"}, "data_source", "default") == "mine"
    with pytest.raises(DataError, match="nothing under 'data_source'"):
        data_source_of(row, "data_source")


def test_the_digest_of_rows_takes_keys_of_several_kinds_and_sets() -> None:
    assert rows_digest([{"b": 1, "a": (2,)}]) == hashlib.sha256(b'{"a": [2], "b": 1}').hexdigest()
    assert rows_digest([{1: "x", "a": {2: "y", None: "z"}}]) != rows_digest([{1: "x", "a": {2: "y", None: "w"}}])
    words = {"one", "two", "three", "four"}  # in an order that depends on the hash seed
    assert rows_digest([words]) == rows_digest([sorted(map(repr, words))])
