"""Rows and tokens of a data file are computed once: kept by content, rebuilt where damaged, read when needed."""

import copy
import json
import os
import threading
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as FastTokenizer

from rloom.data import cache, prompts
from rloom.data.cache import CachedFolder, Draft, key_of, stored
from rloom.data.prompts import PromptTable, load_prompts, read_prompt_rows
from rloom.data.rows import Columns
from rloom.errors import DataError
from rloom.launch.identity import content_of, prompts_record
from tests.unit.data.test_data_prompts import row, tokenizer

__all__ = ["tokenizer"]
ROWS = [row(text, ground_truth=str(number)) for number, text in enumerate(("ab", "c", "much2long", "ab"))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "rows.jsonl"


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that were tokenized."""
    found: list[str] = []
    tokenize = prompts.tokenize
    monkeypatch.setattr(
        prompts, "tokenize", lambda texts, own: (found.extend(filter(None, texts)), tokenize(texts, own))[1]
    )
    return found


def with_template(tokenizer: Any, template: str | None) -> Any:
    found = copy.copy(tokenizer)
    found.chat_template = template or found.chat_template
    return found


def load(file: Path, tokenizer: Any, *, limit: int = 8, filters: bool = True, **changed: Any) -> PromptTable:
    rows = read_prompt_rows(file, Columns(), max_samples=None)
    return load_prompts(
        rows,
        tokenizer=tokenizer,
        prompt_key="prompt",
        max_prompt_length=limit,
        filter_overlong=filters,
        truncation="right",
        num_workers=0,
        return_raw_chat=False,
        **changed,
    )


def test_the_second_start_reads_and_tokenizes_nothing(
    folder: Path, file: Path, tokenizer: Any, tokenized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(file, tokenizer)
    found, record = list(first), prompts_record(first)
    assert [prompt.index for prompt in found] == [0, 1, 3] and tokenized == [">ab<", ">c<", ">much2long<", ">ab<"]
    assert record["content"] == content_of(found)  # as checkpoints that exist have it
    tokenized.clear()
    monkeypatch.setattr(prompts, "iter_rows", lambda *arguments: pytest.fail("the file was read"))
    monkeypatch.setattr(PromptTable, "__getitem__", lambda *arguments: pytest.fail("a row was read"))
    again = load(file, tokenizer)
    assert len(again) == 3 and again.rows_by_source() == {"test": [0, 1, 3]} and again.different == 3
    assert prompts_record(again) == record and again.rows.content == first.rows.content
    monkeypatch.undo()
    assert list(again) == found and tokenized == []


def test_another_limit_tokenizes_nothing_and_another_template_or_row_does(
    folder: Path, file: Path, tokenizer: Any, tokenized: list[str]
) -> None:
    load(file, tokenizer)
    tokenized.clear()
    assert [len(prompt.tokens) for prompt in load(file, tokenizer, limit=3, filters=False)] == [3, 3, 3, 3]
    assert tokenized == []
    load(file, with_template(tokenizer, "{{ messages[0].content }}"))
    assert tokenized == ["ab", "c", "much2long", "ab"]
    tokenized.clear()
    file.write_text(json.dumps(row("ef")) + "\n")
    assert [prompt.text for prompt in load(file, tokenizer)] == [">ef<"] == tokenized


def test_what_rows_and_tokens_depend_on_belongs_to_their_keys(
    folder: Path, file: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(template: str | None = None) -> list[str]:
        return [prompt.text for prompt in load(file, with_template(tokenizer, template))]

    assert len(read_prompt_rows(file, Columns(), max_samples=None)) == 4
    assert len(read_prompt_rows(file, Columns(), max_samples=2)) == 2
    with pytest.raises(DataError, match="has nothing under 'question'"):
        read_prompt_rows(file, Columns(prompt_key="question"), max_samples=None)
    assert texts("{{ strftime_now('%Y') }}")[0] == str(date.today().year)

    class Later(date):
        @classmethod
        def today(cls) -> date:
            return date(2199, 12, 31)

    monkeypatch.setattr(prompts, "date", Later)
    written = len(list(folder.iterdir()))
    texts("{{ strftime_now('%Y') }}")
    assert len(list(folder.iterdir())) == written + 1, "a template that writes today's date"
    assert load(file, tokenizer)[0].tokens == load(file, reversed_ids(tokenizer))[0].tokens[::-1]


def reversed_ids(tokenizer: Any) -> Any:
    """The first and the last token of "<ab>" have each other's number."""
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    numbers = description["model"]["vocab"]
    numbers[">"], numbers["<"] = numbers["<"], numbers[">"]
    numbers["a"], numbers["b"] = numbers["b"], numbers["a"]
    other = copy.copy(tokenizer)
    other._tokenizer = FastTokenizer.from_str(json.dumps(description))
    return other


def test_the_digest_is_that_of_the_prompts_that_a_run_uses(folder: Path, file: Path, tokenizer: Any) -> None:
    for limit in (8, 3, 8):
        found = load(file, tokenizer, limit=limit)
        assert prompts_record(found) == {"rows": len(found), "content": content_of(list(found))}


def test_values_are_those_of_the_file_bit_for_bit(folder: Path, file: Path, tokenizer: Any) -> None:
    """Also half of a surrogate pair, which is no UTF-8."""
    file.write_text(json.dumps(row("ab", extra_info={"x": [1, 1.0, True, "\ud83d"]})) + "\n")
    for _ in range(2):
        (prompt,) = load(file, tokenizer)
        assert prompt.text == ">ab<" and repr(prompt.extra_info) == "{'x': [1, 1.0, True, '\\ud83d']}"


def test_a_prompt_with_half_of_a_surrogate_pair_is_named(folder: Path, file: Path, tokenizer: Any) -> None:
    file.write_text(json.dumps(row("ab")) + "\n" + json.dumps(row("\ud83d")) + "\n")
    with pytest.raises(DataError, match=r"row 1 \(counting from 0\): the prompt is not text \(surrogates not"):
        load(file, tokenizer)


def test_a_row_is_read_from_the_cache_and_not_from_a_file_that_was_changed(
    folder: Path, file: Path, tokenizer: Any
) -> None:
    found = load(file, tokenizer)
    file.write_text("changed while the run goes on")
    assert (
        found[1].columns["prompt"] == "c" and found[1].ground_truth == "1" and found[1].tokens == found[1:2][0].tokens
    )


@pytest.mark.parametrize("damage", ["shorter", "another byte", "offsets", "no facts", "a file", "a link"])
def test_what_is_damaged_or_foreign_is_rebuilt(
    folder: Path, file: Path, tokenizer: Any, tokenized: list[str], tmp_path: Path, damage: str
) -> None:
    expected = list(load(file, tokenizer))
    for entry in list(folder.iterdir()):
        records = next(entry.glob("*.records"), None)
        if damage == "shorter" and records is not None:
            records.write_bytes(records.read_bytes()[:-1])
        elif damage == "another byte" and records is not None:
            content = bytearray(records.read_bytes())
            content[0] ^= 1
            records.write_bytes(content)
        elif damage == "offsets":
            for offsets in entry.glob("*.offsets"):
                offsets.write_bytes(bytes(offsets.stat().st_size))
        elif damage == "no facts":
            (entry / "about.json").write_text("[]")
        elif damage in ("a file", "a link"):
            cache.remove(entry)
            if damage == "a file":
                entry.write_text("not of rloom")
            else:
                entry.symlink_to(tmp_path / "nowhere")
    tokenized.clear()
    assert list(load(file, tokenizer)) == expected and tokenized
    tokenized.clear()
    assert list(load(file, tokenizer)) == expected and not tokenized


def test_two_runs_that_start_at_once_both_get_the_rows(folder: Path) -> None:
    barrier, found = threading.Barrier(2, timeout=60), list[CachedFolder]()

    def write(draft: Draft) -> dict[str, Any]:
        barrier.wait()  # neither has finished when the other begins
        draft.write(("rows",), [(b"a",), (b"bc",)])
        return {"rows": 2}

    threads = [threading.Thread(target=lambda: found.append(stored("key", write))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[bytes(one.records["rows"][n]) for n in range(2)] for one in found] == [[b"a", b"bc"]] * 2
    assert [path.name for path in folder.iterdir()] == ["key"]


def test_a_write_that_fails_leaves_nothing(folder: Path) -> None:
    def rows() -> Iterator[tuple[bytes]]:
        yield (b"a",)
        raise DataError("row 1 is wrong")

    with pytest.raises(DataError, match="row 1 is wrong"):
        stored("key", lambda draft: (draft.write(("rows",), rows()), {})[1])
    assert list(folder.iterdir()) == []


def write_10_kb(draft: Draft) -> dict[str, Any]:
    draft.write(("rows",), [(b"x" * 10_000,)])
    return {}


def test_the_folders_that_were_used_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT_BYTES", 35_000)
    first, second, third, fourth = (key_of(number) for number in range(4))
    for age, key in enumerate((first, second, third)):
        stored(key, write_10_kb)
        os.utime(folder / key, (age, age))
    stored(first, write_10_kb)  # used again
    stored(fourth, write_10_kb)
    assert {path.name for path in folder.iterdir()} == {first, third, fourth}


def test_only_folders_of_the_cache_are_removed_from_a_folder_with_other_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LIMIT_BYTES", 15_000)
    abandoned = f".{key_of(0)}.{'0' * 16}"
    for name in (".ssh", "models", key_of(0), abandoned, f"{abandoned}.backup"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_bytes(b"x" * 20_000)
        os.utime(folder / name, (0, 0))
    stored(key_of(1), write_10_kb)
    assert {path.name for path in folder.iterdir()} == {".ssh", "models", f"{abandoned}.backup", key_of(1)}


def test_a_draft_that_another_run_may_be_writing_is_left(folder: Path) -> None:
    draft = folder / f".{key_of(0)}.{'0' * 16}"
    draft.mkdir(parents=True)
    stored(key_of(1), write_10_kb)
    assert draft.is_dir()


def test_a_folder_of_another_user_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("key", write_10_kb)

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")  # or EROFS

    monkeypatch.setattr(os, "utime", refuse)
    assert stored("key", lambda draft: pytest.fail("written again")).records["rows"][0] == b"x" * 10_000


def test_rows_of_a_file_that_changes_while_it_is_read_are_not_kept(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, read = file.read_bytes(), prompts.iter_rows

    def changed_before(path: Path, at_most: int | None) -> Iterator[Any]:
        path.write_text(json.dumps(row("of another file")) + "\n")
        return read(path, at_most)

    monkeypatch.setattr(prompts, "iter_rows", changed_before)
    with pytest.raises(DataError, match=r"rows\.jsonl was changed while it was read; start again"):
        read_prompt_rows(file, Columns(), max_samples=None)
    monkeypatch.undo()
    monkeypatch.setenv("RLOOM_CACHE", str(folder))
    file.write_bytes(first)
    assert len(read_prompt_rows(file, Columns(), max_samples=None)) == 4


def test_any_special_token_that_a_chat_template_uses_belongs_to_the_key(
    folder: Path, file: Path, tokenizer: Any
) -> None:
    template = "{{ pad_token }}{{ messages[0].content }}"
    found, other = [], copy.copy(tokenizer)
    for pad in ("<", ">"):
        other.pad_token = pad
        found.append(load(file, with_template(other, template))[1].text)
    assert found == ["<c", ">c"]


def test_without_a_cache_a_temporary_file_serves(tmp_path: Path, file: Path, tokenizer: Any, monkeypatch: Any) -> None:
    (tmp_path / "in_the_way").touch()
    monkeypatch.setenv("RLOOM_CACHE", str(tmp_path / "in_the_way" / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert [prompt.text for prompt in load(file, tokenizer)] == [">ab<", ">c<", ">ab<"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in_the_way", "rows.jsonl"]


def test_values_that_json_cannot_hold_stay_in_memory_as_they_are(folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    rows = [{**ROWS[0], "picture": b"\x00\x01"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = load(tmp_path / "a.parquet", tokenizer)
    assert found[0].columns["picture"] == b"\x00\x01" and found.key is None
    assert prompts_record(found)["content"] == content_of(list(found))
