import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloom.data.files import read_rows
from rloom.data.prepare import PREPARERS, prepare, script
from rloom.errors import DataError

REPOSITORY = Path(__file__).parents[2]
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
    written = prepare("gsm8k", tmp_path / "out", gsm8k_source)
    assert written == [tmp_path / "out" / "train.parquet", tmp_path / "out" / "test.parquet"]
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
    with pytest.raises(DataError, match=r"train\.jsonl: no such file; the nearest name in .* is training\.jsonl"):
        prepare("gsm8k", tmp_path / "out", tmp_path)


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_without_the_datasets_library_the_way_out_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes its import fail
    with pytest.raises(DataError, match=r"--source, or install it: .* -m pip install .*--editable"):
        prepare(name, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_without_a_network_the_way_out_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(DataError, match=r"openai/gsm8k: cannot be downloaded \(no route to host\); .* --source"):
        prepare("gsm8k", tmp_path, None)


def test_without_a_source_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(repository: str, subset: str | None, *, split: str) -> Any:
        asked.append((repository, subset, split))
        rows = GSM8K_TRAIN if split == "train" else GSM8K_TEST
        return SimpleNamespace(to_list=lambda: rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    train_file, _ = prepare("gsm8k", tmp_path, None)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert read_rows(train_file)[0]["reward_model"]["ground_truth"] == "1080"


def test_an_unknown_set_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"gsm9k: not a known data set; choose one of {', '.join(PREPARERS)}"):
        prepare("gsm9k", tmp_path, None)


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


@pytest.mark.parametrize("flag", ["--local_save_dir", "--local_dir"])
def test_the_script_takes_both_names_of_the_folder(
    tmp_path: Path, gsm8k_source: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert script("gsm8k", [flag, str(out), "--source", str(gsm8k_source)]) == 0
    assert capsys.readouterr().out == f"{out / 'train.parquet'}\n{out / 'test.parquet'}\n"


def test_the_script_reports_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("gsm8k", ["--local_dir", str(tmp_path), "--source", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'none' / 'train.jsonl'}: no such file")


def test_the_example_scripts_run_beside_a_module_named_math(tmp_path: Path, gsm8k_source: Path) -> None:
    example = REPOSITORY / "examples" / "data_preprocess" / "gsm8k.py"
    command = [sys.executable, str(example), "--local_dir", str(tmp_path / "out"), "--source", str(gsm8k_source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_rows(tmp_path / "out" / "train.parquet")) == 1


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
