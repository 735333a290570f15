"""Addresses of machines, and the secret that lets them into a run."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rloom.errors import ConfigError, WorkerError
from rloom.runtime import joining
from rloom.runtime.joining import HeadCheck, wait_for_head
from rloom.runtime.nodes import check_head_address, interface_of, machine_marks, reachable
from rloom.runtime.secret import new_secret, on_this_machine, read_secret, secret_file
from tests.ranks import free_port

ADDRESS = "10.0.0.1:6379"


@pytest.fixture(autouse=True)
def without_rays_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of something that answers, and is not Ray."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_machines_are_in_the_order_of_their_numbers() -> None:
    machines = [{"CPU": 8.0, f"rloom_node_{number}": 1.0} for number in (10, 2, 0, 11, 1)] + [{"CPU": 8.0}]
    assert machine_marks(machines) == [f"rloom_node_{number}" for number in (0, 1, 2, 10, 11)]


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None  # an address that is nobody's


def test_nobody_listens_on_a_port_that_nobody_opened() -> None:
    assert not reachable("127.0.0.1:1", timeout_s=0.5)


def test_machine_0_is_told_that_an_address_is_not_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        check_head_address("203.0.113.7:6379")  # of a network for documents: nobody has it
    said = str(caught.value)
    assert said.startswith(
        "trainer.master_addr=203.0.113.7: this machine, trainer.node_rank=0, does not have that address"
    )
    assert "127.0.0.1" in said and "listens" not in said
    check_head_address(f"127.0.0.1:{free_port()}")


def test_machine_0_is_told_that_its_port_is_taken(listener: str) -> None:
    with pytest.raises(ConfigError, match=f"another process listens on {listener}"):
        check_head_address(listener)


def test_a_run_has_a_new_secret_that_its_user_alone_can_read(tmp_path: Path) -> None:
    """A second run of this process has the same one, since Ray reads it once; other processes have others."""
    run, file = tmp_path / "run", secret_file(tmp_path / "run", ADDRESS)
    found = []
    for _ in range(2):
        with new_secret(run, ADDRESS):
            assert file.stat().st_mode & 0o777 == 0o600
            assert [path.name for path in run.iterdir()] == [file.name]
            assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(file) and os.environ["RAY_AUTH_MODE"] == "token"
            found.append(read_secret(file))
            assert not [name for name, value in os.environ.items() if value == found[-1]]
        assert not file.exists() and "RAY_AUTH_TOKEN_PATH" not in os.environ
    another = "from rloom.runtime.secret import secret_of_this_process as secret; print(secret())"
    found.append(subprocess.run([sys.executable, "-c", another], capture_output=True, text=True).stdout.strip())
    assert found[0] == found[1] != found[2] and all(secret is not None and len(secret) == 64 for secret in found)


def test_a_run_on_one_machine_has_a_secret_too_outside_of_its_directory(tmp_path: Path) -> None:
    with on_this_machine():
        file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert os.environ["RAY_AUTH_MODE"] == "token" and len(file.read_text()) == 64
    assert not file.parent.exists() and "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_a_secret_that_a_killed_run_left_is_replaced(tmp_path: Path) -> None:
    file = secret_file(tmp_path, ADDRESS)
    file.write_text("old")
    with new_secret(tmp_path, ADDRESS):
        assert read_secret(file) != "old"


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_TOKEN", "mine"), ("RAY_AUTH_TOKEN_PATH", "/mine"),
                                             ("RAY_AUTH_MODE", "disabled")])  # fmt: skip
def test_what_the_user_says_of_tokens_counts(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret_file(tmp_path, ADDRESS).write_text("old")
    monkeypatch.setenv(name, value)
    before = {**os.environ, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
    with new_secret(tmp_path, ADDRESS):
        assert dict(os.environ) == before
        assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_private_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777, **_: make(path, flags, 0o644))
    with pytest.raises(ConfigError, match="lets other users read every file"):
        new_secret(tmp_path, ADDRESS).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_a_secret_says_where_it_looked_and_both_ways_out(tmp_path: Path, listener: str) -> None:
    said: list[str] = []
    file = secret_file(tmp_path, listener)
    with pytest.raises(WorkerError) as caught:
        wait_for_head(HeadCheck(listener, lambda: file), 0.3, said.append)
    waiting = f"machine 0 answers at {listener}, and its secret is not in {file}"
    assert said == [f"Waiting up to 0 s: {waiting}"]
    assert str(caught.value) == (
        f"After trainer.start_timeout_s=0: {waiting}. Put trainer.default_local_dir on a file system that all machines "
        f"share (here it is {tmp_path}), or set RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH, a file) to the same secret on "
        "every machine"
    )


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """In place of `ray health-check`: a command that accepts one secret."""

    def accepts(secret: str) -> None:
        script = tmp_path / "ray"
        script.write_text(
            f"#!{sys.executable}\nimport os, pathlib, sys\n"
            "given = os.environ.get('RAY_AUTH_TOKEN') or pathlib.Path(os.environ['RAY_AUTH_TOKEN_PATH']).read_text()\n"
            f"sys.exit(0 if given == {secret!r} else 'AuthenticationError: InvalidAuthToken')\n"
        )
        script.chmod(0o700)
        monkeypatch.setattr(joining, "ray_command", lambda: str(script))

    return accepts


def test_a_machine_does_not_join_with_the_secret_of_an_earlier_run(
    tmp_path: Path, listener: str, head: Callable[[str], None]
) -> None:
    head("new")
    file = secret_file(tmp_path, listener)
    file.write_text("old")
    said: list[str] = []

    def report(text: str) -> None:
        said.append(text)
        file.write_text("new")  # machine 0's, which has just begun

    wait_for_head(HeadCheck(listener, lambda: file), 30, report)
    assert said == [f"Waiting up to 30 s: {file} has the secret of an earlier run, which {listener} does not accept"]


def test_a_secret_of_the_users_that_is_not_machine_0s_is_refused_at_once(
    tmp_path: Path, listener: str, head: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    head("new")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    with pytest.raises(WorkerError, match="does not accept this machine's RAY_AUTH_TOKEN"):
        wait_for_head(HeadCheck(listener, lambda: secret_file(tmp_path, listener)), 30, print)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "new")
    wait_for_head(HeadCheck(listener, lambda: secret_file(tmp_path, listener)), 30, print)


def test_something_else_at_the_address_is_told_from_rays_head(
    tmp_path: Path, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real `ray health-check`, which would wait for most of a minute."""
    pytest.importorskip("ray")
    monkeypatch.setattr(joining, "HEALTH_CHECK_S", 1.0)
    file = secret_file(tmp_path, listener)
    file.write_text("secret")
    with pytest.raises(WorkerError) as caught:
        wait_for_head(HeadCheck(listener, lambda: file), 0.1, print)
    said = str(caught.value)
    assert f"the process that answers at {listener} is not Ray's head. " in said
    assert "trainer.master_port is the same on every machine" in said and "Traceback" not in said
