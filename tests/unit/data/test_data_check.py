"""`rloom data check`: every planted fault is found at its row, and is an error if and only if `train` refuses it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom.cli.data import main
from rloom.data.check import CheckSettings, check_file, check_files, length_histogram, render_report
from rloom.data.prompts import load_prompts, read_prompt_rows
from rloom.data.rows import Columns
from rloom.errors import RloomError
from rloom.rewards.routing import check_sources


class CharacterTokenizer:
    """One token a character, no chat template."""

    name_or_path = "characters"
    chat_template = None
    bos_token = None
    eos_token_id = None

    def __call__(self, text: list[str], *, add_special_tokens: bool, verbose: bool) -> Mapping[str, Any]:
        return {"input_ids": [[ord(character) for character in one] for one in text]}

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        raise AssertionError("there is no template")


MAX_PROMPT_LENGTH = 60  # "User: " + content + "\n\nAssistant:" is 18 characters more than the content
STRICT = CheckSettings(tokenizer=CharacterTokenizer(), max_prompt_length=MAX_PROMPT_LENGTH)
FUNCTION = CheckSettings(Columns(rules=False))


def write(tmp_path: Path, rows: Any, name: str = "a.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def gsm8k(prompt: Any, truth: Any = "1", **more: Any) -> dict[str, Any]:
    reward_model = {"style": "rule", "ground_truth": truth}
    return {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": reward_model, **more}


def without(row: dict[str, Any], column: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != column}


def train_refuses(path: Path, columns: Columns = STRICT.columns) -> str | None:
    """What `rloom train` does before it loads a model: read the prompts, check that every data source has a rule."""
    try:
        prompts = load_prompts(
            read_prompt_rows(str(path), columns, max_samples=None),
            tokenizer=CharacterTokenizer(),
            prompt_key=columns.prompt_key,
            max_prompt_length=MAX_PROMPT_LENGTH,
            filter_overlong=False,
            truncation="error",
            num_workers=0,
            return_raw_chat=False,
        )
        if columns.rules:
            check_sources({prompt.data_source: [prompt.index] for prompt in prompts})
    except RloomError as error:
        return str(error)
    return None


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


SOUND = [gsm8k("a"), gsm8k("b")]
# name -> (the faulty row, put at row 2; the column and a part of the reason)
REFUSED_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no prompt column": (without(gsm8k("c"), "prompt"), "prompt", "has nothing under 'prompt'; its columns are"),
    "prompt null": (gsm8k(None), "prompt", "has nothing under 'prompt'"),
    "prompt empty text": (gsm8k("  "), "prompt", "an empty string"),
    "prompt empty list": (gsm8k([]), "prompt", "an empty list of messages"),
    "prompt a number": (gsm8k(7), "prompt", "the prompt is int"),
    "message without role": (gsm8k([{"content": "c"}]), "prompt", "message 0 of the prompt has no role"),
    "message without content": (gsm8k([{"role": "user"}]), "prompt", "message 0 of the prompt has no content"),
    "message with empty content": (gsm8k([user(" ")]), "prompt", "the last one, has an empty content"),
    "content not text": (gsm8k([user(5)]), "prompt", "a content of type int"),
    "last message the assistant's": (
        gsm8k([user("c"), {"role": "assistant", "content": "1"}]),
        "prompt",
        "the last message of the prompt is the assistant's",
    ),
    "prompt too long": (gsm8k("c" * 50), "prompt", "68 tokens, over data.max_prompt_length=60"),
    "no data source": (without(gsm8k("c"), "data_source"), "data_source", "has nothing under 'data_source'"),
    "data source a number": (gsm8k("c", data_source=3), "data_source", "'data_source' is 3"),
    "data source without rule": (
        gsm8k("c", data_source="my/own"),
        "data_source",
        "no reward rule for 'my/own' (1 row).",
    ),
    "style model without reward model": (
        gsm8k("c", data_source="my/own", reward_model={"style": "model"}),
        "data_source",
        "The row is for a reward model (reward_model.style is model)",
    ),
    "no ground truth": (
        gsm8k("c", None),
        "reward_model.ground_truth",
        "no ground truth; set reward_model.ground_truth",
    ),
    "no ground truth in a row of the kit": (
        {"data_source": "math_reasoning", "prompt": "c"},
        "ground_truth",
        "no ground truth; set ground_truth",
    ),
    "ground truth no number": (
        gsm8k("c", "seven"),
        "reward_model.ground_truth",
        "'seven' of a openai/gsm8k row is not",
    ),
    "ground truth NaN": (
        gsm8k("c", math.nan, data_source="math"),
        "reward_model.ground_truth",
        "is nan; set the right answer",
    ),
    "braces not closed": (
        gsm8k("c", r"\frac{1}{2", data_source="lighteval/MATH"),
        "reward_model.ground_truth",
        "braces without a partner",
    ),
    "code without tests": (
        gsm8k("c", json.dumps({"entry_point": "f"}), data_source="openai/openai_humaneval"),
        "reward_model.ground_truth",
        "cannot be used: its test is NoneType",
    ),
    "reward_model not an object": (gsm8k("c", reward_model="1"), "reward_model", "'reward_model' is str"),
    "extra_info not an object": (gsm8k("c", extra_info="x"), "extra_info", "'extra_info' is str"),
}
ACCEPTED_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown role": (gsm8k([{"role": "usr", "content": "c"}]), "prompt", "message 0 has the role 'usr'"),
    "repeated prompt": (gsm8k([user("a")]), "prompt", "repeats row 0"),
    "types differ": (gsm8k("c", 7), "reward_model.ground_truth", "is a number; in row 0 it is text"),
    "infinite number": (gsm8k("c", extra_info={"x": [math.inf]}), "extra_info", "NaN or infinite"),
}


@pytest.mark.parametrize("name", REFUSED_ROWS)
def test_what_train_refuses_is_an_error_at_its_row(name: str, tmp_path: Path) -> None:
    faulty, column, reason = REFUSED_ROWS[name]
    path = write(tmp_path, [*SOUND, faulty])
    (found,) = check_file(path, STRICT).errors
    assert (found.column, found.row) == (column, 2)
    assert reason in found.reason
    assert f"    row 2: {found.reason}\n" in render_report(check_file(path, STRICT))
    refused = train_refuses(path)
    assert refused is not None and "row 2" in refused


@pytest.mark.parametrize("name", ACCEPTED_ROWS)
def test_what_train_accepts_is_a_warning_at_its_row(name: str, tmp_path: Path) -> None:
    faulty, column, reason = ACCEPTED_ROWS[name]
    path = write(tmp_path, [*SOUND, faulty])
    report = check_file(path, STRICT)
    assert report.ok
    assert (column, 2) in [(found.column, found.row) for found in report.warnings]
    assert any(reason in found.reason for found in report.warnings)
    assert train_refuses(path) is None


BROKEN_FILES: dict[str, tuple[str, bytes, str]] = {
    "invalid line": ("a.jsonl", b'{"a": 1}\n\n{"a": \n', "a.jsonl, line 3: not valid JSON"),
    "invalid json": ("a.json", b'[{"a": 1},\n{"a": }]', "a.json, line 2: not valid JSON"),
    "an object": ("a.json", b'{"prompt": "a"}', "holds one object; a data file is a list"),
    "a list of texts": ("a.json", b'[{"a": 1}, "b"]', "row 1 (counting from 0): is string"),
    "not UTF-8": ("a.jsonl", b'{"a": "b"}\n{"a": "\xb4\xf3"}\n', "a.jsonl, line 2: not UTF-8 text"),
    "UTF-16": ("a.json", '[{"a": 1}]'.encode("utf-16"), "a.json, line 1: not UTF-8 text"),
    "empty": ("a.json", b"", "holds no rows"),
    "empty list": ("a.json", b"[]", "holds no rows"),
    "no gzip": ("a.json.gz", b"[]", "cannot be read"),
    "another format": ("a.csv", b"a,b\n", "the name determines the format"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_an_error_with_its_line(name: str, tmp_path: Path) -> None:
    file, content, reason = BROKEN_FILES[name]
    path = tmp_path / file
    path.write_bytes(content)
    (found,) = check_file(path, STRICT).errors
    assert (found.column, found.row) == ("file", None)
    assert reason in found.reason
    assert found.reason in str(train_refuses(path))


def test_a_truncated_parquet_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(SOUND), path)
    assert check_file(path, STRICT).ok
    path.write_bytes(path.read_bytes()[:-20])
    assert "not a readable parquet file" in check_file(path, STRICT).errors[0].reason
    assert "not a readable parquet file" in str(train_refuses(path))


def test_a_byte_order_mark_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(gsm8k("a")).encode())
    report = check_file(path, STRICT)
    assert (report.ok, report.rows) == (True, 1)
    assert "byte order mark" in report.warnings[0].reason
    assert train_refuses(path) is None


def test_a_prompt_in_two_files_is_a_warning(tmp_path: Path) -> None:
    train = write(tmp_path, [gsm8k("a"), gsm8k("b")], "train.json")
    test = write(tmp_path, [gsm8k("c"), gsm8k([user("b")])], "test.json")
    first, second = check_files([train, test], CheckSettings())
    assert first.warnings == []
    assert [
        (found.row, found.reason) for found in second.warnings if found.column == "prompt" and "also" in found.reason
    ] == [(1, f"is also row 1 of {train}")]
    assert first.ok and second.ok


def test_rows_for_a_reward_model_or_an_own_function_need_no_rule(tmp_path: Path) -> None:
    path = write(tmp_path, [{"data_source": "Anthropic/hh-rlhf", "prompt": "a", "reward_model": {"style": "model"}}])
    found = check_file(path, CheckSettings()).errors[0].reason
    assert "reward_model.enable=True reward_model.path=MODEL" in found
    assert "custom_reward_function.path=" in found
    assert check_file(path, FUNCTION).ok
    assert train_refuses(path, FUNCTION.columns) is None
    assert [main(["check", str(path), *flag]) for flag in ([], ["--reward_model"], ["--own_reward"])] == [1, 0, 0]


def test_a_sound_file_is_ok(tmp_path: Path) -> None:
    kit_row = {"data_source": "math_reasoning", "prompt": "b", "ground_truth": "42"}
    path = write(tmp_path, [gsm8k("a", "72"), gsm8k("c", "-1,080.5"), kit_row])
    report = check_file(path, CheckSettings())
    assert report.prompt_lengths is None
    assert render_report(report) == (
        f"{path}: 3 rows (numbered from 0)\n"
        "columns: data_source, prompt, reward_model, ground_truth\n"
        "data sources:\n"
        "  openai/gsm8k: 2 rows\n"
        "  math_reasoning: 1 row\n"
        "ok: 3 rows"
    )


def test_a_column_shows_its_first_five_rows_and_the_number_of_all(tmp_path: Path) -> None:
    report = check_file(write(tmp_path, [gsm8k(str(number), None) for number in range(25)]), CheckSettings())
    shown = render_report(report)
    assert "errors: 25\n  reward_model.ground_truth: 25\n    row 0: " in shown
    assert "    row 4: " in shown and "    row 5: " not in shown
    assert shown.endswith("    and 20 more\nnot ok: errors: 25")


def test_a_data_source_without_a_rule_is_named_once_with_its_rows(tmp_path: Path) -> None:
    rows = [{"data_source": "my/own", "prompt": str(number), "ground_truth": "x"} for number in range(3)]
    (found,) = check_file(write(tmp_path, rows), CheckSettings()).errors
    assert found.row == 0
    assert found.reason.startswith("no reward rule for 'my/own' (3 rows). Use a registered data source (openai/gsm8k, ")


def test_the_command_checks_all_files_and_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write(tmp_path, [gsm8k("a")], "good.json"), write(tmp_path, [gsm8k([])], "bad.json")
    assert main(["check", str(good)]) == 0
    capsys.readouterr()
    assert main(["check", str(bad), str(tmp_path / "none.json"), str(good)]) == 1
    shown = capsys.readouterr().out
    assert "row 0: the prompt is an empty list of messages" in shown
    assert "none.json: no such file" in shown
    assert shown.endswith("ok: 1 row\n")
    assert main(["check", str(good), "--max_prompt_length", "9"]) == 2
    assert "add --tokenizer MODEL" in capsys.readouterr().err
    assert main(["check", str(good), "--tokenizer", "embedded", "--max_prompt_length", "2"]) == 1
    assert "prompt length in tokens: " in capsys.readouterr().out


def test_prompt_lengths_are_those_of_the_rendered_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, [gsm8k("a"), gsm8k([]), gsm8k("b" * 40)])
    report = check_file(path, CheckSettings(tokenizer=CharacterTokenizer()))
    assert report.prompt_lengths == (19, 58)
    assert (
        "prompt length in tokens: 19 to 58, mean 38.5\n"
        "  up to 16   0\n"
        f"  up to 32  {'█' * 40} 1\n"
        f"  up to 64  {'█' * 40} 1\n"
    ) in render_report(report)


def test_the_histogram_has_doubling_bounds() -> None:
    assert length_histogram([1, 16, 17, 64, 65]) == [(16, 2), (32, 1), (64, 1), (128, 1)]


def test_other_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": "a", "origin": "openai/gsm8k", "ground_truth": "1"}])
    assert main(["check", str(path)]) == 1
    assert main(["check", str(path), "--prompt_key", "question", "--reward_fn_key", "origin"]) == 0
