import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom.cli.data import main

CHAT = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "be terse"}, {"role": "user", "content": "2 + 3？"}],
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"index": 7, "tags": ["a", "b"]},
}
KIT = {"data_source": "math_reasoning", "prompt": "计算 15 + 27", "ground_truth": 42}


def shown(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (CHAT, KIT, KIT, KIT)), encoding="utf-8")
    return path


def test_rows_are_printed_as_chat_turns_and_values(jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, jsonl, "-n", 2) == (
        f"{jsonl}: 4 rows (numbered from 0)\n\n"
        "--- row 0\n"
        "data_source: openai/gsm8k\n"
        "[system] be terse\n"
        "[user] 2 + 3？\n"
        "reward_model.ground_truth: 5\n"
        "reward_model.style: rule\n"
        "extra_info.index: 7\n"
        'extra_info.tags: ["a", "b"]\n\n'
        "--- row 1\n"
        "data_source: math_reasoning\n"
        "[user] 计算 15 + 27\n"
        "ground_truth: 42\n"
    )


def test_three_rows_without_n_and_one_with_row(jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, jsonl).count("--- row") == 3
    assert shown(capsys, jsonl, "-n", 9).count("--- row") == 4
    one = shown(capsys, jsonl, "--row", 3)
    assert "--- row 3\n" in one and one.count("--- row") == 1
    assert main(["show", str(jsonl), "--row", "4"]) == 2
    assert "has no row 4; its rows are 0 to 3" in capsys.readouterr().err
    assert main(["show", str(jsonl), "-n", "0"]) == 2


def test_parquet_and_json_rows_look_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.Table.from_pylist([CHAT]), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps([CHAT]), encoding="utf-8")
    texts = [shown(capsys, tmp_path / name).partition("---")[2] for name in ("a.parquet", "a.json")]
    assert texts[0] == texts[1] != ""


def test_a_tokenizer_shows_the_rendered_prompt_and_its_length(jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, jsonl, "--row", 1, "--tokenizer", "embedded")
    # three special tokens, three line ends, user, assistant, 计算, four digits, " +" and two spaces
    assert "prompt, 16 tokens:\n<|im_start|>user\n计算 15 + 27<|im_end|>\n<|im_start|>assistant\n" in text


def test_long_text_is_cut_with_its_length_and_faults_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{**KIT, "prompt": "x" * 2001}, {"prompt": [], "data_source": "math"}]))
    text = shown(capsys, path)
    assert f"[user] {'x' * 2000}... (the first 2000 of 2001 characters)\n" in text
    assert "fault in prompt: the prompt is an empty list of messages\n" in text
