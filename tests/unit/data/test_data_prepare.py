import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom.cli.data import main
from rloom.data.check import CheckSettings, check_files
from rloom.data.files import read_rows
from rloom.data.prepare import PREPARERS, prepare
from rloom.data.rows import Columns
from rloom.errors import DataError

REPOSITORY = Path(__file__).parents[3]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the published data sets are not here")

GSM8K_TRAIN = [{"question": "1000 + 80?", "answer": "Add.\n#### 1,080"}]
GSM8K_TEST = [{"question": "3 - 5?", "answer": "Less.\n#### -2"}]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def gsm8k_source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    write_lines(source / "train.jsonl", GSM8K_TRAIN)
    write_lines(source / "test.jsonl", GSM8K_TEST)
    return source


def test_gsm8k_is_written_in_the_documented_layout(tmp_path: Path, gsm8k_source: Path) -> None:
    counts = prepare("gsm8k", tmp_path / "out", gsm8k_source)
    assert counts == {tmp_path / "out" / "train.parquet": 1, tmp_path / "out" / "test.parquet": 1}
    written = list(counts)
    question = '1000 + 80? Think step by step, then give the final answer after "####".'
    assert read_rows(written[0]) == [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "1080"},
            "extra_info": {"split": "train", "index": 0, "answer": "Add.\n#### 1,080", "question": "1000 + 80?"},
        }
    ]
    (test_row,) = read_rows(written[1])
    assert test_row["reward_model"]["ground_truth"] == "-2"
    assert test_row["extra_info"]["split"] == "test"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_a_gsm8k_row_without_its_mark_is_named(tmp_path: Path, gsm8k_source: Path) -> None:
    write_lines(gsm8k_source / "train.jsonl", [*GSM8K_TRAIN, {"question": "1?", "answer": "1"}])
    with pytest.raises(DataError, match=r"train\.jsonl, row 1 \(counting from 0\): no #### in the answer"):
        prepare("gsm8k", tmp_path / "out", gsm8k_source)
    assert not (tmp_path / "out").exists()


def test_math_takes_answers_or_boxes_and_leaves_out_rows_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = [
        {"problem": "a?", "answer": None, "difficulty": 3.0, "type": "Algebra"},
        {"problem": "b?", "answer": "98", "difficulty": 5.0, "type": "Algebra"},
        {"problem": "c?", "solution": r"So \boxed{\frac{1}{2}}.", "difficulty": 1.0, "type": "Geometry"},
        {"problem": "d?", "answer": "", "difficulty": 3.0, "type": "Algebra"},
    ]
    (tmp_path / "train.json").write_text(json.dumps(train), encoding="utf-8")
    test = {"problem": "e?", "solution": r"\boxed{7}", "answer": "7", "subject": "Precalculus", "level": 2}
    write_lines(tmp_path / "test500.jsonl", [test])
    train_file, test_file = prepare("math", tmp_path, tmp_path)
    rows = read_rows(train_file)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["98", r"\frac{1}{2}"]
    assert rows[0]["extra_info"] == {"split": "train", "index": 1, "question": "b?", "level": 5.0, "subject": "Algebra"}
    assert rows[0]["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert caplog.messages == ["math: left out 2 of 4 train rows that have no answer"]
    assert read_rows(test_file) == [
        {
            "data_source": "HuggingFaceH4/MATH-500",
            "prompt": [{"role": "user", "content": r"e? Think step by step and put the final answer within \boxed{}."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {
                "split": "test",
                "index": 0,
                "question": "e?",
                "answer": r"\boxed{7}",
                "level": 2,
                "subject": "Precalculus",
            },
        }
    ]


def test_a_missing_source_file_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "training.jsonl", GSM8K_TRAIN)
    with pytest.raises(
        DataError, match=r"holds no train\.jsonl \(or main/train-\*\.parquet\); it holds training\.jsonl"
    ):
        prepare("gsm8k", tmp_path / "out", tmp_path)


def test_an_unknown_set_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"gsm9k: not a known data set; choose one of {', '.join(PREPARERS)}"):
        prepare("gsm9k", tmp_path, None)
    with pytest.raises(DataError, match=r"python: an environment without data of its own; prepare .*: gsm8k or math"):
        prepare("python", tmp_path, None)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, gsm8k_source: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"--local_save_dir .*file: cannot be written"):
        prepare("gsm8k", tmp_path / "file", gsm8k_source)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, gsm8k_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare("gsm8k", tmp_path / "out", gsm8k_source)

    def full_disk(table: Any, path: Path) -> None:
        path.write_bytes(b"PAR1")
        raise OSError("no space left on device")

    monkeypatch.setattr("rloom.data.prepare.pq.write_table", full_disk)
    with pytest.raises(DataError, match="no space left"):
        prepare("gsm8k", tmp_path / "out", gsm8k_source)
    assert len(read_rows(tmp_path / "out" / "train.parquet")) == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_arithmetic_is_generated(tmp_path: Path) -> None:
    train_file, test_file = prepare("arithmetic", tmp_path, None)
    train, test = read_rows(train_file), read_rows(test_file)
    assert (len(train), len(test)) == (8192, 512)
    assert {row["data_source"] for row in train + test} == {"math_reasoning"}
    with pytest.raises(DataError, match="leave --source out"):
        prepare("arithmetic", tmp_path, tmp_path)


def test_the_example_scripts_run_beside_a_module_named_math(tmp_path: Path, gsm8k_source: Path) -> None:
    example = REPOSITORY / "examples" / "data_preprocess" / "gsm8k.py"
    command = [sys.executable, str(example), "--local_dir", str(tmp_path / "out"), "--source", str(gsm8k_source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    train, test = tmp_path / "out" / "train.parquet", tmp_path / "out" / "test.parquet"
    assert done.stdout == f"{train}: 1 rows\n{test}: 1 rows\n"
    assert len(read_rows(train)) == 1


@needs_shared_data
def test_the_published_gsm8k_has_its_known_rows(tmp_path: Path) -> None:
    train, test = (read_rows(path) for path in prepare("gsm8k", tmp_path, SHARED_DATA / "gsm8k"))
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0]["reward_model"]["ground_truth"] == "72"
    assert test[0]["reward_model"]["ground_truth"] == "18"


@needs_shared_data
def test_the_published_math_has_its_known_rows(tmp_path: Path) -> None:
    train, test = (read_rows(path) for path in prepare("math", tmp_path, SHARED_DATA / "math"))
    assert (len(train), len(test)) == (7470, 500)  # four of the 7,474 have no answer
    assert train[0]["reward_model"]["ground_truth"] == "0"
    assert test[0]["reward_model"]["ground_truth"] == r"\left( 3, \frac{\pi}{2} \right)"


@pytest.mark.parametrize("flag", ["--local_save_dir", "--local_dir"])
def test_the_command_takes_both_names_of_the_folder(
    tmp_path: Path, gsm8k_source: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["prepare", "gsm8k", flag, str(out), "--source", str(gsm8k_source)]) == 0
    assert capsys.readouterr().out == f"{out / 'train.parquet'}: 1 rows\n{out / 'test.parquet'}: 1 rows\n"
    assert main(["prepare", "gsm8k", flag, str(out), "--source", str(tmp_path / "none")]) == 2
    assert "--source " in capsys.readouterr().err


def test_without_a_folder_the_files_go_to_data_in_the_home(
    tmp_path: Path, gsm8k_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["prepare", "gsm8k", "--source", str(gsm8k_source)]) == 0
    assert len(read_rows("~/data/gsm8k/train.parquet")) == 1


def test_a_folder_of_hf_download_is_a_source(tmp_path: Path) -> None:
    """The paths of the hub's repositories, shards and all."""
    folder = tmp_path / "raw" / "main"
    folder.mkdir(parents=True)
    for name, rows in (("train-00000-of-00002", 2), ("train-00001-of-00002", 1), ("test-00000-of-00001", 1)):
        pq.write_table(pa.Table.from_pylist(GSM8K_TRAIN * rows), folder / f"{name}.parquet")
    assert list(prepare("gsm8k", tmp_path / "out", tmp_path / "raw").values()) == [3, 1]
    assert [row["extra_info"]["index"] for row in read_rows(tmp_path / "out" / "train.parquet")] == [0, 1, 2]


def pair(prompt: str, chosen: str = "yes", rejected: str = "no") -> dict[str, str]:
    return {"chosen": f"{prompt}\n\nAssistant: {chosen}", "rejected": f"{prompt}\n\nAssistant: {rejected}"}


def test_hh_rlhf_is_a_chat_up_to_the_last_human_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    two_turns = "\n\nHuman: a?\n\nAssistant: b\n\nc\n\nHuman: d?"
    train = [
        pair(two_turns),
        pair("\n\nHuman: one?"),
        pair("\n\nHuman: e?\n\nHuman: f?"),
        pair("\n\nHuman: "),
        {"chosen": "no dialogue", "rejected": "none"},
        {"chosen": None, "rejected": "none"},
        pair("\n\nHuman: g?", rejected=""),
    ]
    write_lines(tmp_path / "x_train.jsonl", train)
    write_lines(tmp_path / "x_test.jsonl", [pair("\n\nHuman: one?")])
    train_file, test_file = prepare("hh_rlhf", tmp_path, tmp_path)
    rows = read_rows(train_file)
    assert rows[0] == {
        "data_source": "Anthropic/hh-rlhf",
        "prompt": [
            {"role": "user", "content": "a?"},
            {"role": "assistant", "content": "b\n\nc"},
            {"role": "user", "content": "d?"},
        ],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": "yes"},
        "extra_info": {"split": "train", "index": 0, "rejected": "no"},
    }
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert len(read_rows(test_file)) == 1
    assert [message.partition(" (first")[0] for message in caplog.messages] == [
        "hh_rlhf: left out 1 of 7 train rows: the turns of chosen do not alternate from a human turn to an answer",
        "hh_rlhf: left out 1 of 7 train rows: chosen has an empty turn",
        "hh_rlhf: left out 1 of 7 train rows: chosen has no human turn and an answer to it",
        "hh_rlhf: left out 1 of 7 train rows: chosen is not text",
        "hh_rlhf: left out 1 of 7 train rows: rejected has an empty turn",
    ]
    assert "x_train.jsonl, row 2 (counting from 0)" in caplog.messages[0]


def test_hh_rlhf_without_a_pair_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "x_train.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match="none of the 1 train rows is a pair of dialogues"):
        prepare("hh_rlhf", tmp_path, tmp_path)


@needs_shared_data
def test_one_published_file_of_hh_rlhf_is_divided_without_a_common_prompt(tmp_path: Path) -> None:
    """13 of its 2,312 pairs are malformed."""
    source = SHARED_DATA / "hh_rlhf" / "harmless-base_test.jsonl.gz"
    train, test = prepare("hh_rlhf", tmp_path, source)
    assert (len(read_rows(train)), len(read_rows(test))) == (2188, 111)
    reports = check_files([train, test], CheckSettings(Columns(rules=False)))
    assert [report.ok for report in reports] == [True, True]
    assert not [warning for warning in reports[1].warnings if "is also row" in warning.reason]


@needs_shared_data
def test_the_documents_pandas_snippets_print_what_the_document_says(tmp_path: Path) -> None:
    prepare("gsm8k", tmp_path / "data" / "gsm8k", SHARED_DATA / "gsm8k")
    for column, expected in (
        ("reward_model", "{'style': 'rule', 'ground_truth': '72'}"),
        ("data_source", "openai/gsm8k"),
    ):
        snippet = f"""
import pandas as pd
df = pd.read_parquet('~/data/gsm8k/train.parquet')
print(df.iloc[0]['{column}'])
"""
        command = [sys.executable, "-c", snippet]
        done = subprocess.run(command, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


def test_the_notes_scripts_run_from_any_folder(tmp_path: Path, gsm8k_source: Path) -> None:
    train, _ = prepare("gsm8k", tmp_path / "out", gsm8k_source)
    notes = REPOSITORY / "learning_notes"
    for name, shown in (
        ("01_快速上手/check_data.py", "ok: 1 row"),
        ("02_数据准备/data_quality_check.py", "最短 71，中位数 71，最长 71，共 1 条"),
    ):
        command = [sys.executable, str(notes / name), str(train)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout
    command = [sys.executable, str(notes / "02_数据准备/data_quality_check.py"), str(tmp_path / "none.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (done.returncode, "no such file" in done.stdout) == (1, True), done.stderr


def test_another_instruction_follows_the_question(tmp_path: Path, gsm8k_source: Path) -> None:
    own = ["--instruction", r"Answer in \boxed{}."]
    arguments = ["prepare", "gsm8k", "--local_save_dir", str(tmp_path / "own"), "--source", str(gsm8k_source)]
    assert main([*arguments, *own]) == 0
    (row,) = read_rows(tmp_path / "own" / "train.parquet")
    assert row["prompt"] == [{"role": "user", "content": r"1000 + 80? Answer in \boxed{}."}]
    assert row["reward_model"]["ground_truth"] == "1080"
    assert main([*arguments, "--instruction", ""]) == 0
    (test_row,) = read_rows(tmp_path / "own" / "test.parquet")
    assert test_row["prompt"] == [{"role": "user", "content": "3 - 5?"}]


def test_a_set_without_an_instruction_has_none_to_replace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--instruction: arithmetic has none to replace, as gsm8k and math have"):
        prepare("arithmetic", tmp_path, None, "Answer with a number.")
