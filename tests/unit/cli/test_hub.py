"""Hub faults, against a real server on localhost that `HF_ENDPOINT` names."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom import hub
from rloom.data.files import read_rows
from rloom.data.prepare import prepare
from rloom.errors import DataError, ModelError
from rloom.launch.inputs import with_embedded
from rloom.models.load import load_tokenizer
from rloom.models.source import EMBEDDED_FOLDER, ModelSource, check_folder
from tests.hub_server import HubServer, hub_server

REPOSITORY = Path(__file__).parents[3]
NAMES = ("train", "test")


def parquet(path: Path, question: str, answer: str) -> bytes:
    pq.write_table(pa.Table.from_pylist([{"question": question, "answer": answer}]), path)
    return path.read_bytes()


@pytest.fixture
def gsm8k(tmp_path: Path) -> dict[str, dict[str, bytes]]:
    files = {
        f"main/{split}-00000-of-00001.parquet": parquet(tmp_path / split, f"{split}?", "So.\n#### 1,080")
        for split in NAMES
    }
    return {"datasets/openai/gsm8k": {"README.md": b"", "socratic/train-00000-of-00001.parquet": b"", **files}}


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # restored after the test
    monkeypatch.setattr(hub, "TIMEOUT_S", 60.0)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", url)
    hub.check_model.cache_clear()


@pytest.fixture
def mirror(gsm8k: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(gsm8k) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        yield server


def test_a_data_set_is_prepared_from_the_mirror(mirror: HubServer, tmp_path: Path) -> None:
    assert list(prepare("gsm8k", tmp_path / "out", None).values()) == [1, 1]
    (train,) = read_rows(tmp_path / "out" / "train.parquet")
    assert train["reward_model"] == {"style": "rule", "ground_truth": "1080"}
    assert train["extra_info"]["question"] == "train?"
    fetched = [path for method, path in mirror.requests if method == "GET" and "/resolve/" in path]
    assert [path.rpartition("/")[2] for path in fetched] == [f"{split}-00000-of-00001.parquet" for split in NAMES]


def test_files_of_a_data_set_on_the_hub_are_downloaded(mirror: HubServer) -> None:
    [file] = with_embedded("hf://datasets/openai/gsm8k/main/train*", "train.parquet")
    assert read_rows(file) == [{"question": "train?", "answer": "So.\n#### 1,080"}]
    assert [Path(file).name for file in hub.files_at("hf://datasets/openai/gsm8k@~parquet/main/test*")] == [
        "test-00000-of-00001.parquet"
    ]
    assert any("refs%2Fconvert%2Fparquet" in path for _, path in mirror.requests)
    with pytest.raises(
        DataError, match=r"files of several folders: main, socratic; name one: hf://datasets/openai/gsm8k/F"
    ):
        hub.files_at("hf://datasets/openai/gsm8k/*/train*")
    with pytest.raises(DataError, match=r"^hf://datasets/gsm8k: it is no hf://datasets/OWNER/NAME/FILE"):
        hub.files_at("hf://datasets/gsm8k")


def test_the_command_reads_hf_endpoint_and_hf_token(gsm8k: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "examples/data_preprocess/gsm8k.py"), "--local_save_dir", str(tmp_path)]
    with hub_server(gsm8k) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "secret"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (
            0,
            f"{tmp_path / 'train.parquet'}: 1 rows\n{tmp_path / 'test.parquet'}: 1 rows\n",
        ), done.stderr
        assert "Bearer secret" in server.tokens
    closed = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "other")}
    done = subprocess.run(command, env=closed, capture_output=True, text=True, timeout=300)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)  # one message, no retries
    assert f"the hub {closed['HF_ENDPOINT']} cannot be reached" in done.stderr


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 500}, "answered with status 500 for http"),
        ({"status": 401, "error_code": "GatedRepo"}, "only to users who accepted its terms"),
        ({"status": 401, "error_code": "RepoNotFound"}, r"has no {name}, or HF_TOKEN .*status 401"),
        ({"status": 404, "error_code": "RepoNotFound"}, r"has no {name}, or HF_TOKEN .*status 404"),
        ({"status": 404, "error_code": "EntryNotFound"}, "has {name}, but not the file http"),
        ({"delay_s": 10.0}, "did not answer within 1 s"),
    ],
)
def test_each_fault_of_a_hub_is_named_after_one_request(
    mirror: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, object], message: str
) -> None:
    for name, value in fault.items():
        setattr(mirror, name, value)
    if mirror.delay_s:
        monkeypatch.setattr(hub, "TIMEOUT_S", 1.0)
    with pytest.raises(DataError, match=f"the hub {mirror.url} .*{message.format(name='openai/gsm8k')}") as data_error:
        prepare("gsm8k", tmp_path / "out", None)
    with pytest.raises(ModelError, match=message.format(name="owner/model")) as model_error:
        check_folder(ModelSource("owner/model"))
    for way in (
        "HF_ENDPOINT=https://",
        "HF_TOKEN",
        "--source FOLDER with train.jsonl",
        "hf download openai/gsm8k --repo",
    ):
        assert way in str(data_error.value)
    for way in ("HF_ENDPOINT=https://", "HF_TOKEN", "give the folder", "`hf download owner/model --local-dir FOLDER`"):
        assert way in str(model_error.value)
    asked = [path for _, path in mirror.requests if "agent-harnesses" not in path]  # huggingface_hub's own
    assert asked == ["api/datasets/openai/gsm8k", "owner/model/resolve/main/config.json"]
    assert not (tmp_path / "out").exists()


def test_a_repository_without_the_files_lists_what_it_has(mirror: HubServer, tmp_path: Path) -> None:
    mirror.files = {"datasets/openai/gsm8k": {"README.md": b"", "data.csv": b""}}
    with pytest.raises(DataError, match=r"has no main/train-\*\.parquet in it \(it has README\.md, data\.csv\)"):
        prepare("gsm8k", tmp_path, None)


def test_a_server_that_is_no_hub_is_named(mirror: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mirror.commit = None
    with pytest.raises(DataError, match=f"{mirror.url} answers, but not as a Hugging Face hub"):
        prepare("gsm8k", tmp_path, None)


def test_a_model_is_refused_in_one_message_with_the_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, "http://127.0.0.1:1", tmp_path)  # nothing listens there
    with pytest.raises(ModelError, match=r"path=some/model: there is no such folder, and the hub .* cannot be reached"):
        check_folder(ModelSource("some/model"))
    with pytest.raises(ModelError, match="no name on a hub, which is OWNER/NAME"):
        check_folder(ModelSource("three/part/name"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set, and other/model was not downloaded before"):
        check_folder(ModelSource("other/model"))
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or .*--source"):
        prepare("gsm8k", tmp_path, None)


def test_a_downloaded_model_is_used_when_the_hub_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the check, transformers repeats each request for a minute: 187 s for this tokenizer."""
    files = {file.name: file.read_bytes() for file in (EMBEDDED_FOLDER / "model").iterdir()}
    with hub_server({"owner/tiny": files}) as server:
        use(monkeypatch, server.url, tmp_path)
        assert load_tokenizer(ModelSource("owner/tiny")).chat_template
        server.status, asked = 500, len(server.requests)
        hub.check_model.cache_clear()
        assert load_tokenizer(ModelSource("owner/tiny")).chat_template
        assert len(server.requests) == asked + 1
    assert caplog.messages == [
        f"actor_rollout_ref.model.path=owner/tiny: the hub {server.url} answered with status 500 for "
        f"{server.url}/owner/tiny/resolve/main/config.json; the copy in the local cache is used"
    ]
