"""Run directories that no run wrote: whatever a file holds, other runs are shown, and every page answers."""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rloom.cli import main
from rloom.errors import RloomError
from rloom.runs.dumps.index import FOLDER, INDEX, SCHEMA, TOKENIZER, Index
from rloom.runs.records import EVENTS_FILE, METRICS_FILE
from rloom.runs.run_folder import CONFIG_FILE, RunFolder, Status, summaries
from rloom.view.http_errors import RequestFault
from rloom.view.query import Query, to_json
from rloom.view.routes import answer
from rloom.view.run_cache import RunCache
from tests.view_client import viewing
from tests.view_runs import table, train_rows, write_run

EVENT_PAGES = ("metrics", "timeline", "timeline?first=1&last=1", "config", "findings")
DUMP_PAGES = ("dumps", "validation", "train/1/prompts?text=a&sort=mean", "train/1/prompts/0", "prompts/7/history")
INDEX_FILE = f"{FOLDER}/{INDEX}"
DUMP = f"{FOLDER}/train/1.parquet"
# as JSON: some are no Python value
VALUES = (
    *("[]", '{"a": {"b": 1}}', "[2]", '"text"', "null", "true", "-1", "2.5", "1e300", "1e999", "NaN", '"\\ud800"'),
    *("9" * 30, "9" * 5000, "[" * 200 + "]" * 200),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("good") / "sums" / "good", steps=2)


def opened(bad: Path, good: Path) -> RunCache:
    """The first is number 0; the viewer lists the one that was written last first."""
    for written_s, run in enumerate((good, bad)):
        os.utime(run / EVENTS_FILE, (written_s, written_s))
    return RunCache([bad, good])


def page(runs: RunCache, address: str) -> Any:
    """What the server answers; the text of a fault that it names. Any other exception is a 500."""
    path, _, query = address.partition("?")
    try:
        return json.loads(to_json(answer(runs, path, Query.parse(query))))
    except (RequestFault, RloomError, OSError) as fault:
        assert str(fault)
        return str(fault)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of a JSON value; of a mapping's many like values, and of a list's, the first."""
    if isinstance(value, dict):
        of_kind: set[type] = set()
        for name, inner in value.items():
            if path and type(inner) in of_kind:
                continue
            of_kind.add(type(inner))
            yield (*path, name)
            yield from places(inner, (*path, name))
    elif isinstance(value, list) and value:
        yield (*path, 0)
        yield from places(value[0], (*path, 0))


def changed(line: str, path: Sequence[Any], text: str | None) -> str:
    """With another value at the path, None: without it."""
    mark = "the value that is replaced"
    whole = json.loads(line)
    inner = whole
    for name in path[:-1]:
        inner = inner[name]
    if text is None:
        del inner[path[-1]]
        return json.dumps(whole)
    inner[path[-1]] = mark
    return json.dumps(whole).replace(json.dumps(mark), text)


def mutants(file: Path) -> Iterator[tuple[str, int, str]]:
    """(name of the mutation, line, its new text) for one line of each kind in a file."""
    lines = file.read_text().splitlines()
    seen: set[Any] = set()
    for number, line in enumerate(lines):
        row = json.loads(line)
        kind = (row.get("event"), row.get("kind"), tuple(row)[:4] if "event" not in row else ())
        if kind in seen:
            continue
        seen.add(kind)
        yield "whole line", number, "[" * 100_000
        for path in places(row):
            yield f"{path} gone", number, changed(line, path, None)
            for value in VALUES:
                yield f"{path} = {value[:20]}", number, changed(line, path, value)


@pytest.mark.parametrize(
    ("name", "pages", "fewest"),
    [(EVENTS_FILE, EVENT_PAGES, 350), (METRICS_FILE, (), 40), (INDEX_FILE, DUMP_PAGES, 250)],
)
def test_a_field_of_any_kind_leaves_the_rest_of_the_run(
    good: Path, tmp_path: Path, name: str, pages: Sequence[str], fewest: int
) -> None:
    bad = Path(shutil.copytree(good, tmp_path / "bad"))
    lines, count, seen = (good / name).read_text().splitlines(), 0, set()
    whole = len(RunFolder(good).events)
    for mutation, number, line in mutants(good / name):
        (bad / name).write_text("\n".join([*lines[:number], line, *lines[number + 1 :], ""]))
        runs = opened(bad, good)
        listed = page(runs, "/api/runs")
        assert len(listed["runs"]) == 2, mutation
        assert {run["state"]["status"] for run in listed["runs"]} <= {"finished", "unknown", "failed", "running"}, (
            mutation
        )
        folder, index = RunFolder(bad), Index(bad / FOLDER)
        assert folder.skipped + index.skipped <= 1, mutation
        assert len(folder.events) >= whole - 11, mutation  # those of the step that another `run` removes
        read = repr((folder.events, index.entries))
        for address in pages if read not in seen else ():  # most of the mutants are skipped, and look the same then
            page(runs, f"/api/runs/0/{address}")
        if name == EVENTS_FILE and read not in seen:
            page(runs, "/api/compare?runs=0,1")
        seen.add(read)
        count += 1
    assert count >= fewest


# ---- whole files


def as_fifo(file: Path) -> None:
    os.mkfifo(file)


def as_link(file: Path) -> None:
    secret = file.parent.parent / "secret"
    secret.write_text("password: hunter2\n")
    file.symlink_to(secret)


def as_folder(file: Path) -> None:
    file.mkdir()


def as_socket(file: Path) -> None:
    here = Path.cwd()
    os.chdir(file.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(file.name)
    finally:
        os.chdir(here)


def as_text(text: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(text) and None  # type: ignore[func-returns-value]


KINDS: Mapping[str, Callable[[Path], None]] = {
    "FIFO": as_fifo,
    "link": as_link,
    "folder": as_folder,
    "socket": as_socket,
    "bytes": as_text(b"\x00\xff\xfe\n" * 1000),
    "empty": as_text(b""),
    "parquet": as_text(b"PAR1" + b"\x00" * 100 + b"PAR1"),
}
PAGES = (*EVENT_PAGES, *DUMP_PAGES)
FILES = (EVENTS_FILE, METRICS_FILE, CONFIG_FILE, INDEX_FILE, DUMP, f"{FOLDER}/{TOKENIZER}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_hides_no_run_and_stops_no_page(
    good: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(FILES):
        bad = Path(shutil.copytree(good, tmp_path / f"bad {number}"))
        (bad / name).unlink()
        KINDS[kind](bad / name)
    with viewing([tmp_path, good]) as viewer:  # its client gives up after a while
        listed = viewer.get("/api/runs")["runs"]
        assert len(listed) == len(FILES) + 1
        for run in listed:
            answers = [viewer.ask(f"/api/runs/{run['id']}/{page}") for page in PAGES]
            assert {found.status for found in answers} <= {200, 404}
            assert all(found.status == 200 or found.json()["error"] for found in answers)
            assert b"hunter2" not in b"".join(found.body for found in answers)
        numbers = ",".join(str(run["id"]) for run in listed)
        compared = viewer.ask(f"/api/compare?runs={numbers}")
        assert compared.status in (200, 404)
    names = [str(tmp_path / f"bad {number}") for number in range(len(FILES))]
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("/bad ") >= len(FILES)
    for name in names:
        assert main(["doctor", name]) in (0, 1, 2)
        assert main(["compare", name, str(good)]) in (0, 2)
    assert "hunter2" not in capsys.readouterr().out


def test_the_reason_is_listed_with_the_run(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (EVENTS_FILE, CONFIG_FILE):
        bad = Path(shutil.copytree(good, tmp_path / name))
        (bad / name).unlink()
        as_link(bad / name)
    by_name = {found.path.name: found for found in summaries([tmp_path])}
    reason = "is a symbolic link; rloom writes none, and follows none in a run"
    state = by_name[EVENTS_FILE].state
    assert (state.status, state.error) == (Status.UNREADABLE, f"{EVENTS_FILE} {reason}")
    found = by_name[CONFIG_FILE]
    assert (found.state.status, found.model) == (Status.FINISHED, None)
    assert found.fault == f"{CONFIG_FILE} cannot be read: {CONFIG_FILE} {reason}"
    main(["runs", str(tmp_path)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"unreadable: {EVENTS_FILE} is a symbolic link" in said and f"{CONFIG_FILE} cannot be read" in said
    assert main(["doctor", str(tmp_path / EVENTS_FILE)]) == 2
    assert reason in capsys.readouterr().err


def test_records_that_are_left_out_are_counted_wherever_the_run_is_shown(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Path(shutil.copytree(good, tmp_path / "bad"))
    for name in (EVENTS_FILE, INDEX_FILE):
        with (bad / name).open("a") as out:
            out.write('{"time": [1], "event": "step", "step": 3, "metrics": {}}\nno JSON\n\n')
    runs = RunCache([bad])
    assert page(runs, "/api/runs/0/metrics")["skipped"] == 2
    assert page(runs, "/api/runs/0/metrics")["fault"] is None
    assert page(runs, "/api/runs/0/dumps")["skipped"] == 2
    assert page(runs, "/api/runs/0/findings")["faults"] == ["events.jsonl: 2 records do not fit and are left out"]
    main(["compare", str(bad), str(good)])
    assert capsys.readouterr().out.count("events.jsonl: 2 records do not fit and are left out") == 1
    main(["doctor", str(bad)])
    assert "events.jsonl: 2 records do not fit and are left out" in capsys.readouterr().out


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
CONFIGS = {
    "aliases": (ALIASES, "it has a YAML alias, which rloom never writes"),
    "a circle": ("a: &a [*a]\n", "it has a YAML alias, which rloom never writes"),
    "deep lists": ("a: " + "[" * 200_000 + "]" * 200_000, "it has more than 32 sections or lists inside of each other"),
    "deep sections": ("".join("  " * i + "a:\n" for i in range(500)), "it has more than 32 sections"),
    "long": ("a: " + "x" * (1 << 20), "it has more than 1,048,576 bytes"),
    "list": ("- 1\n", "it holds no configuration"),
    "Python": ("a: !!python/object/apply:os.system [touch marker]\n", "could not determine a constructor"),
    "no date": ("a: 2020-99-99\n", "month must be in 1..12"),
    "NUL": ("a: \x00\n", "not allowed"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_no_run_wrote_is_a_reason(good: Path, tmp_path: Path, name: str) -> None:
    text, reason = CONFIGS[name]
    bad = Path(shutil.copytree(good, tmp_path / "bad"))
    (bad / CONFIG_FILE).write_text(text)
    runs = opened(bad, good)
    found = page(runs, "/api/runs/0/metrics")
    assert found["fault"].startswith("config.yaml cannot be read: ") and reason in found["fault"]
    assert page(runs, "/api/runs/0/config")["config"] == {}
    assert isinstance(page(runs, "/api/compare?runs=0,1"), dict) and len(page(runs, "/api/runs")["runs"]) == 2


def test_values_of_a_configuration_that_json_does_not_have_are_text(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(
        "date: 2020-01-02\n? 5\n: {3.5: .nan, set: !!set {x}, bytes: !!binary aGk=}\n"
        "data: {train_batch_size: .inf, large: " + ":".join(["59"] * 3000) + "}\n"
        "algorithm: {adv_estimator: [1]}\nactor_rollout_ref: 7\ncritic: null\n"
    )
    config = page(RunCache([tmp_path]), "/api/runs/0/config")["config"]
    assert config == {
        "date": "2020-01-02",
        "5.3.5": "nan",
        "5.set": "{'x'}",
        "5.bytes": "b'hi'",
        "data.train_batch_size": "inf",
        "data.large": "an integer of 17721 bits",
        "algorithm.adv_estimator": [1],
        "actor_rollout_ref": 7,
        "critic": None,
    }
    for address in EVENT_PAGES:
        page(RunCache([tmp_path]), f"/api/runs/0/{address}")


ROWS = {
    "no group": {"group": None},
    "a negative row": {"index": -1},
    "no text": {"output": None},
    "a score that is no number": {"score": float("nan")},
    "an infinite score": {"accuracy": float("inf")},
    "half a turn": {"turns": [0]},
    "a turn of two billion tokens": {"turns": [0, 2**31 - 1]},
    "turns backwards": {"turns": [1, 0]},
    "no tokens": {"tokens": None},
    "an unknown token": {"tokens": [-5], "turns": [0, 1]},
    "too few numbers": {"logprobs": [0.5]},
    "a number that is missing": {"logprobs": [None], "tokens": [1], "turns": [0, 1]},
    "parts that are a list": {"parts": "[1]"},
    "deep parts": {"parts": "[" * 100_000},
    "parts that are text": {"parts": '{"a": "b"}'},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_dump_with_a_row_that_no_run_wrote_is_a_reason(good: Path, tmp_path: Path, name: str) -> None:
    bad = Path(shutil.copytree(good, tmp_path / "bad"))
    rows = [{**row, **(ROWS[name] if place == 1 else {})} for place, row in enumerate(train_rows(1))]
    pq.write_table(table(rows), bad / DUMP)
    runs = RunCache([bad])
    answers = [page(runs, f"/api/runs/0/train/1/{address}") for address in ("prompts", "prompts?text=a", "prompts/0")]
    reasons = [found for found in answers if isinstance(found, str)]
    assert reasons and all(found.startswith("the dump of train step 1 cannot be read: row 1 has") for found in reasons)
    assert page(runs, "/api/runs/0/train/2/prompts")["total"] == 6


def test_a_dump_that_is_cut_short_or_has_other_columns_is_a_reason(good: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(good, tmp_path / "bad"))
    content = (bad / DUMP).read_bytes()
    for share in range(0, 10):
        (bad / DUMP).write_bytes(content[: len(content) * share // 10])
        assert "cannot be read" in page(RunCache([bad]), "/api/runs/0/train/1/prompts")
    pq.write_table(table(train_rows(1)).drop_columns(["score"]), bad / DUMP)
    assert "it has other columns" in page(RunCache([bad]), "/api/runs/0/train/1/prompts")
    assert "score" in SCHEMA.names
