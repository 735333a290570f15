import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom.data.files import read_rows
from rloom.errors import DataError

ROWS = [{"prompt": "2 + 3?", "ground_truth": "5"}, {"prompt": "二加二？", "ground_truth": "4"}]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def fault(path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        read_rows(path)
    return str(caught.value)


def test_all_formats_give_the_same_rows(tmp_path: Path) -> None:
    as_list = json.dumps(ROWS, ensure_ascii=False)
    as_lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
    write(tmp_path / "a.json", as_list)
    write(tmp_path / "a.jsonl", as_lines)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(as_list.encode()))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(as_lines.encode()))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.json", "a.jsonl", "a.json.gz", "a.jsonl.gz", "a.parquet"):
        assert read_rows(tmp_path / name) == ROWS, name
        assert read_rows(tmp_path / name, at_most=1) == ROWS[:1], name
        assert read_rows(tmp_path / name, at_most=99) == ROWS, name


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '\ufeff{"prompt": "a"}\n\n{"prompt": "b"}\n   \n')
    assert read_rows(file) == [{"prompt": "a"}, {"prompt": "b"}]


def test_parquet_values_are_plain_python_without_keys_the_row_did_not_have(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "extra_info": {"index": 0, "level": 3.5}},
        {"prompt": [{"role": "tool", "content": "b", "name": "calc"}], "extra_info": {"index": 1, "tags": ["x"]}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    read = read_rows(tmp_path / "a.parquet")
    assert read == rows
    assert type(read[0]["prompt"]) is list
    assert type(read[1]["extra_info"]["index"]) is int


def test_a_null_column_of_parquet_keeps_its_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "ability": pa.array([None], pa.string())}), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == [{"prompt": "a", "ability": None}]


def test_home_and_environment_variables_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.json", json.dumps(ROWS))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA_FOLDER", str(tmp_path))
    assert read_rows("~/a.json") == read_rows("$DATA_FOLDER/a.json") == ROWS


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", "")
    write(tmp_path / "LICENSE", "")
    wrong = tmp_path / "trian.parquet"
    assert fault(wrong) == f"{wrong}: no such file; the nearest name in {tmp_path} is train.parquet"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"the folder {tmp_path / 'nowhere'} does not exist either" in fault(tmp_path / "nowhere" / "a.json")
    assert f"the folder {tmp_path} holds no data files" in fault(tmp_path / "a.json")


def test_a_folder_in_place_of_a_file_lists_its_data_files(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", "")
    write(tmp_path / "notes.txt", "")
    assert fault(tmp_path) == f"{tmp_path}: is a folder; name a file in it: b.jsonl"


def test_an_address_is_not_a_path() -> None:
    assert "only local files are read" in fault("s3://bucket/train.parquet")


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "prompt\n")
    assert fault(file).endswith("must end in .parquet, .json, .jsonl, .json.gz or .jsonl.gz")


def test_a_broken_line_of_jsonl_is_named_by_its_number(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n\n{"prompt": \n')
    assert fault(file).startswith(f"{file}, line 3: not valid JSON")
    file = write(tmp_path / "b.jsonl", '{"prompt": "a"}\n["b"]\n')
    assert fault(file) == f"{file}, line 2: is list, each line must be an object"


def test_broken_json_is_named_by_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", '[\n{"prompt": "a"},\n{"prompt" "b"}\n]')
    assert fault(file).startswith(f"{file}, line 3: not valid JSON")


def test_jsonl_under_the_name_of_json_is_recognised(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", '{"prompt": "a"}\n{"prompt": "b"}\n')
    assert fault(file).endswith("if it holds one object per line, name it .jsonl")


def test_json_must_be_a_list_of_objects(tmp_path: Path) -> None:
    assert "holds one object" in fault(write(tmp_path / "a.json", '{"prompt": "a"}'))
    assert "row 1 (counting from 0): is string" in fault(write(tmp_path / "b.json", '[{"prompt": "a"}, "b"]'))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.json.gz", "a.jsonl.gz"):
        assert fault(write(tmp_path / name, "no such format")).startswith(f"{tmp_path / name}: ")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode())[:-12])
    assert fault(cut).startswith(f"{cut}: cannot be read")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    assert "not UTF-8 text" in fault(latin)


def test_an_empty_file_is_named_in_the_error(tmp_path: Path) -> None:
    for name, text in (("a.json", ""), ("b.json", "[]"), ("a.jsonl", "\n")):
        assert fault(write(tmp_path / name, text)).startswith(f"{tmp_path / name}: holds no rows")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert fault(tmp_path / "a.parquet").startswith(f"{tmp_path / 'a.parquet'}: holds no rows")
    assert "not a readable parquet file" in fault(write(tmp_path / "b.parquet", ""))


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000, '{"a": ' + "[" * 70 + "]" * 70 + "}", '{"a": ' + '{"b": ' * 70]
)
@pytest.mark.parametrize("name", ["deep.jsonl", "deep.json"])
def test_a_row_that_is_nested_too_deeply_is_named(tmp_path: Path, name: str, text: str) -> None:
    before, after = ("[\n{},\n", "]") if name.endswith(".json") else ("{}\n{}\n", "\n")
    (tmp_path / name).write_text(f"{before}{text}{after}")
    with pytest.raises(DataError, match=rf"{name}, line 3: not valid JSON"):
        read_rows(tmp_path / name)


def test_64_levels_and_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": ' + "[" * 63 + "]" * 63 + "}\n")
    assert len(read_rows(tmp_path / "rows.jsonl")) == 1
    (tmp_path / "rows.jsonl").write_text('{"a": ' + "9" * 5000 + "}\n")
    with pytest.raises(DataError, match=r"rows.jsonl, line 1: not valid JSON \(Exceeds the limit"):
        read_rows(tmp_path / "rows.jsonl")
