"""The process that workers are forked from: which thread it ends with, and which variables it has read."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rloom.runtime import fork_server
from rloom.runtime.fork_server import ForkServer


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fork_server, "_server", None)
    monkeypatch.setattr(fork_server, "CLOSE_S", 0.0)  # nothing waits for imports that no test needs
    yield
    if fork_server._server is not None:
        fork_server._server.close()


@pytest.mark.usefixtures("no_server")
def test_it_outlives_the_thread_that_has_started_it() -> None:
    """Linux sends the signal of PR_SET_PDEATHSIG when that thread ends."""
    found: list[ForkServer] = []

    def start() -> None:
        found.append(fork_server.fork_server())
        maps = Path(f"/proc/{found[0].process.pid}/maps")
        until = time.monotonic() + 60
        while "numpy" not in maps.read_text() and time.monotonic() < until:  # then it has asked for that signal
            time.sleep(0.05)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.5)
    assert found[0].process.poll() is None
    assert fork_server.fork_server() is found[0]


@pytest.mark.usefixtures("no_server")
def test_threads_that_begin_at_once_share_one() -> None:
    found: list[ForkServer] = []
    threads = [threading.Thread(target=lambda: found.append(fork_server.fork_server())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({server.process.pid for server in found}) == 1


@pytest.mark.usefixtures("no_server")
def test_a_run_with_other_variables_of_libraries_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fork_server.fork_server(begins_run=True)
    monkeypatch.setenv("MY_OWN", "1")
    assert fork_server.fork_server(begins_run=True) is first
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert fork_server.fork_server() is first  # in the run: an import of the driver may have set it
    second = fork_server.fork_server(begins_run=True)
    assert second is not first and first.process.poll() is not None
    assert second.variables["HF_HOME"] == "/elsewhere"


@pytest.mark.usefixtures("no_server")
def test_one_with_workers_of_another_run_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = fork_server.fork_server()
    first.on_exit[1] = lambda status: None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert fork_server.fork_server(begins_run=True) is not first
    assert first.process.poll() is None
    first.on_exit.clear()
    first.close()
