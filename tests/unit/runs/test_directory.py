"""One run at a time in a directory, on file systems with locks and without."""

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rloom.config.load import load_config
from rloom.errors import ConfigError
from rloom.launch import run as running
from rloom.launch.directory import LOCK, OWNER, locked
from rloom.trainer import main_ppo


def test_a_second_run_is_refused_and_the_first_one_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "one"
    with locked(directory):
        with (
            pytest.raises(ConfigError, match=rf"{directory}: another run is using it; wait .* or choose another"),
            locked(directory),
        ):
            pass
        assert (directory / LOCK).exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_wrote_stays(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").touch()
    with locked(tmp_path / "run"):
        pass
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK, "metrics.jsonl"]


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    with locked(tmp_path):
        pass
    assert tmp_path.is_dir() and list(tmp_path.iterdir()) == []


def test_the_directory_is_locked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the directory belongs to another run")

    for name in ("prepare", "open_parts"):
        monkeypatch.setattr(running, name, read)
    config = load_config([f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu"])
    with locked(tmp_path), pytest.raises(ConfigError, match="another run is using it"):
        main_ppo.train(config)


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr("fcntl.flock", fail)


def test_without_locks_a_file_says_who_is_there(
    no_flock: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    with locked(directory):
        assert json.loads((directory / OWNER).read_text()) == {"host": socket.gethostname(), "pid": os.getpid()}
        assert f"{directory}: its file system has no locks" in caplog.text and str(directory / OWNER) in caplog.text
    assert not directory.exists()


def ended_process() -> int:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    ("host", "process", "taken"),
    [
        (socket.gethostname(), ended_process, True),
        (socket.gethostname(), os.getpid, True),  # of this number is only one: the owner has ended
        (socket.gethostname(), os.getppid, False),
        ("another-machine", ended_process, False),
    ],
)
def test_without_locks_what_a_dead_run_left_is_replaced(
    no_flock: None, tmp_path: Path, host: str, process: Callable[[], int], taken: bool
) -> None:
    (tmp_path / OWNER).write_text(json.dumps({"host": host, "pid": process()}))
    if taken:
        with locked(tmp_path):
            assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
        return
    with (
        pytest.raises(ConfigError, match=rf"the run of {tmp_path / OWNER} .*if that run has ended, remove the file"),
        locked(tmp_path),
    ):
        pass
    assert (tmp_path / OWNER).exists()


def test_without_locks_a_file_that_is_no_record_is_left_alone(no_flock: None, tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text("not JSON")
    with pytest.raises(ConfigError, match="remove the file"), locked(tmp_path):
        pass
    assert (tmp_path / OWNER).read_text() == "not JSON"
