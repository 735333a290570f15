"""HumanEval and MBPP as data files, and `rloom data check` on code problems."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rloom.data.check import CheckSettings, check_file
from rloom.data.files import read_rows
from rloom.data.prepare import prepare
from rloom.errors import DataError

REPOSITORY = Path(__file__).parents[3]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the published data sets are not here")

ADD = {
    "task_id": "HumanEval/0",
    "prompt": "\ndef add(a, b):\n    '''The sum.'''\n",
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


def mbpp_row(task_id: int) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "text": f"Return {task_id}.",
        "code": f"def f(): return {task_id}",
        "test_list": [f"assert f() == {task_id}"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def write_mbpp(folder: Path, ids: list[int]) -> None:
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(mbpp_row(number)) + "\n" for number in ids))


def test_humaneval_is_written_in_the_documented_layout(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt") as stream:
        stream.write(json.dumps(ADD) + "\n")
    train, test = (read_rows(file) for file in prepare("humaneval", tmp_path, tmp_path))
    assert test == [
        {
            "data_source": "openai/openai_humaneval",
            "prompt": [
                {
                    "role": "user",
                    "content": "Complete this Python function. Answer with the whole function in a ```python block.\n\n"
                    "```python\ndef add(a, b):\n    '''The sum.'''\n```",
                }
            ],
            "ability": "code",
            "reward_model": {
                "style": "rule",
                "ground_truth": json.dumps({key: ADD[key] for key in ("entry_point", "test", "prompt")}),
            },
            "extra_info": {"split": "test", "index": 0, "task_id": "HumanEval/0", "answer": "    return a + b\n"},
        }
    ]
    assert [row["reward_model"] for row in train] == [row["reward_model"] for row in test]
    assert train[0]["extra_info"]["split"] == "train"


def test_mbpp_is_split_by_task_id_as_published(tmp_path: Path) -> None:
    write_mbpp(tmp_path, [1, 10, 11, 510, 511, 600, 601, 974])
    train, test = (read_rows(file) for file in prepare("mbpp", tmp_path, tmp_path / "mbpp.jsonl"))
    assert [row["extra_info"]["task_id"] for row in train] == [601, 974]
    assert [row["extra_info"]["task_id"] for row in test] == [11, 510]
    assert train[0]["prompt"][0]["content"] == (
        "Return 601. Answer with a Python function in a ```python block. It has to pass these tests:\n\n"
        "```python\nassert f() == 601\n```"
    )
    truth = {"test_list": ["assert f() == 601"], "test_setup_code": ""}
    assert json.loads(train[0]["reward_model"]["ground_truth"]) == truth


def test_rows_of_another_layout_are_named(tmp_path: Path) -> None:
    (tmp_path / "mbpp.jsonl").write_text('{"task_id": 11, "text": "x"}\n')
    with pytest.raises(DataError, match=r"row 0 \(counting from 0\): no code and no test_list"):
        prepare("mbpp", tmp_path / "out", tmp_path)
    write_mbpp(tmp_path, [11])
    with pytest.raises(DataError, match="no rows of the train split"):
        prepare("mbpp", tmp_path / "out", tmp_path)
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b'{"task_id": "HumanEval/0"}\n'))
    with pytest.raises(DataError, match="no prompt and no entry_point and no canonical_solution and no test"):
        prepare("humaneval", tmp_path / "out", tmp_path)


def test_a_ground_truth_that_the_rule_cannot_parse_is_a_fault(tmp_path: Path) -> None:
    truths = [
        '{"inputs": ["1"], "outputs": ["1"]}',
        '{"inputs": ["1"], "outputs": []}',
        "42",
        '{"test_list": ["assert ("]}',
    ]
    rows = [
        {
            "data_source": "apps",
            "prompt": [{"role": "user", "content": str(n)}],
            "reward_model": {"ground_truth": truth},
        }
        for n, truth in enumerate(truths)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = check_file(file, CheckSettings())
    assert [(error.column, error.row) for error in report.errors] == [
        ("reward_model.ground_truth", 1),
        ("reward_model.ground_truth", 2),
        ("reward_model.ground_truth", 3),
    ]
    assert "the ground truth of a row of apps cannot be used: its outputs is not a list" in report.errors[0].reason


@needs_shared_data
@pytest.mark.parametrize(("name", "train", "test"), [("humaneval", 164, 164), ("mbpp", 374, 500)])
def test_the_published_files_become_data_without_faults(name: str, train: int, test: int, tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / "data_preprocess" / f"{name}.py"
    command = [sys.executable, str(script), "--local_save_dir", str(tmp_path), "--source", str(SHARED_DATA / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for split, count in (("train", train), ("test", test)):
        report = check_file(tmp_path / f"{split}.parquet", CheckSettings())
        assert (report.rows, report.ok) == (count, True)
