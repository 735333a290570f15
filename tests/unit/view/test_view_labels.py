"""Tags and hiding of runs: what is written, where, and who may write it."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rloom.view.labels import LABELS_FILE
from tests.view_client import TOKEN, Response, Viewer, viewing
from tests.view_runs import write_run

ADDRESS = "/api/runs/0/labels"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "sums" / "grpo", steps=1)


@pytest.fixture
def viewer(folder: Path) -> Iterator[Viewer]:
    with viewing([folder]) as started:
        yield started


def write(viewer: Viewer, parameters: str, headers: Mapping[str, str | None] | None = None) -> Response:
    """As the page does it."""
    own = {"Cookie": f"rloom_view_{viewer.port}={TOKEN}", "Origin": f"http://127.0.0.1:{viewer.port}"}
    return viewer.request(f"{ADDRESS}?{parameters}", "POST", {"Content-Length": "0", **own, **(headers or {})})


def test_tags_and_hiding_are_in_the_run_directory_and_in_the_list(viewer: Viewer, folder: Path) -> None:
    answer = write(viewer, "tags=good&tags=%E5%9F%BA%E7%BA%BF&tags=good&tags=%20&hidden=yes")
    assert (answer.status, answer.json()) == (200, {"tags": ["good", "基线"], "hidden": True})
    assert json.loads((folder / LABELS_FILE).read_text(encoding="utf-8")) == answer.json()
    (listed,) = viewer.get("/api/runs")["runs"]
    assert (listed["tags"], listed["hidden"]) == (["good", "基线"], True)
    assert write(viewer, "").json() == {"tags": [], "hidden": False}
    assert not (folder / LABELS_FILE).exists()
    assert list(folder.glob("*.tmp")) == list(folder.glob(".*.tmp")) == []


def test_nothing_is_written_before_the_user_changes_a_label(viewer: Viewer, folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    for path in ("/api/runs", "/api/findings", "/api/runs/0/config", "/api/runs/0/search?text=a", ADDRESS):
        viewer.ask(path)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


@pytest.mark.parametrize(
    "headers",
    [
        {"Cookie": None},
        {"Cookie": "rloom_view_1=wrong"},
        {"Origin": None},  # browsers name the page in every POST
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "evil.example"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_only_the_page_of_this_server_may_write(
    viewer: Viewer, folder: Path, headers: Mapping[str, str | None]
) -> None:
    answer = write(viewer, "tags=evil", headers)
    assert answer.status == 403 and answer.json().keys() == {"error"}
    assert not (folder / LABELS_FILE).exists()


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_no_other_method_writes(viewer: Viewer, folder: Path, method: str) -> None:
    answer = viewer.request(
        f"{ADDRESS}?tags=x&token={TOKEN}", method, {"Origin": f"http://127.0.0.1:{viewer.port}", "Content-Length": "0"}
    )
    assert answer.status in (404, 405) and not (folder / LABELS_FILE).exists()


@pytest.mark.parametrize("path", ["/api/runs/1/labels", "/api/runs/x/labels", "/api/runs/0/../labels", "/api/labels"])
def test_labels_belong_to_a_run(viewer: Viewer, path: str) -> None:
    own = {"Cookie": f"rloom_view_{viewer.port}={TOKEN}", "Origin": f"http://127.0.0.1:{viewer.port}"}
    assert viewer.request(path, "POST", {"Content-Length": "0", **own}).status in (404, 405)


@pytest.mark.parametrize(
    "parameters",
    [
        *("tags=%3Cscript%3E", "tags=a%0Ab", "tags=" + "x" * 41, "tags=a%2Cb", "tags=%E2%80%AEx", "hidden=maybe"),
        "&".join(f"tags=t{i}" for i in range(21)),
        "&".join(f"tags=t{i}" for i in range(40)),
    ],
)
def test_labels_that_are_none_are_refused(viewer: Viewer, folder: Path, parameters: str) -> None:
    assert write(viewer, parameters).status == 400 and not (folder / LABELS_FILE).exists()


def test_a_body_is_not_read(viewer: Viewer) -> None:
    assert write(viewer, "tags=a", {"Content-Length": "5"}).status == 400


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"tags": 5}', '{"tags": ["<b>", 7, null], "hidden": 1}', "[" * 100_000]
)
def test_a_file_that_the_viewer_did_not_write_has_no_labels(viewer: Viewer, folder: Path, content: str) -> None:
    (folder / LABELS_FILE).write_text(content)
    (listed,) = viewer.get("/api/runs")["runs"]
    assert (listed["tags"], listed["hidden"]) == ([], False)


def test_a_link_is_neither_read_nor_written_through(viewer: Viewer, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.json"
    target.write_text('{"tags": ["secret"]}')
    (folder / LABELS_FILE).symlink_to(target)
    assert viewer.get("/api/runs")["runs"][0]["tags"] == []
    assert write(viewer, "tags=mine").status == 200
    assert target.read_text() == '{"tags": ["secret"]}' and not (folder / LABELS_FILE).is_symlink()


def test_a_folder_that_cannot_be_written_to_says_so(
    viewer: Viewer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("rloom.view.labels.replace_text", fail)
    answer = write(viewer, "tags=a")
    assert answer.status == 409
    assert answer.json() == {"error": f"the labels cannot be written to {folder / LABELS_FILE}: Permission denied"}
