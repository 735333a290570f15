"""`rloom view` as a command: what it prints, how it ends, and its errors."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rloom.cli import main
from rloom.cli.parsing import default_run_folders
from rloom.cli.view import FIRST_PORT, greeting, has_display, listen
from rloom.errors import ConfigError
from rloom.language import to_chinese
from rloom.view.access import ViewAccess
from rloom.view.run_cache import RunCache
from tests.view_runs import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "sums" / "grpo", steps=1)


def test_it_prints_the_address_serves_the_run_and_ends_quietly_with_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "rloom", "view", str(run.parent), "--port", "0", "--no-open"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C", "RLOOM_VIEW_TOKEN": ""},
        # a background process of a shell, as a test run may be, ignores ctrl-C, and so do its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        address, elsewhere, end = (process.stdout.readline() for _ in range(3))
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{22})\n", address)
        assert found is not None and end == "ctrl-C ends it\n"
        port = found[1]
        assert re.fullmatch(rf"from another machine: ssh -N -L {port}:127\.0\.0\.1:{port} \S+@\S+\n", elsewhere)
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=120)
        connection.request("GET", f"/api/runs?token={found[2]}")
        answer = connection.getresponse()
        assert answer.status == 200 and b'"sums/grpo"' in answer.read()  # the connection stays open
    finally:
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
            connection.close()
    assert (process.returncode, out.strip(), err) == (0, "", "")


def test_a_path_that_is_no_run_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in ((tmp_path, "is no run directory and has none below it"), (tmp_path / "x", "is no folder")):
        assert main(["view", str(path), "--no-open"]) == 2
        assert f"rloom: data error: {path} {said}" in capsys.readouterr().err


def test_without_a_path_the_folders_of_rloom_train_and_train_sh_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", "--no-open"]) == 2
    assert "checkpoints is no folder" in capsys.readouterr().err
    (tmp_path / "outputs" / "checkpoints").mkdir(parents=True)
    assert default_run_folders() == [Path("outputs/checkpoints")]
    (tmp_path / "checkpoints").mkdir()
    assert default_run_folders() == [Path("checkpoints"), Path("outputs/checkpoints")]


def test_a_port_in_use_is_an_error_that_names_the_flag(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["view", str(run), "--no-open", "--port", str(port)]) == 2
        said = capsys.readouterr().err
        assert f"--port {port}: cannot listen on 127.0.0.1 (Address already in use); choose another --port" in said
    assert main(["view", str(run), "--port", "65536"]) == 2
    assert "--port 65536: use a number from 0 to 65535" in capsys.readouterr().err


def test_without_a_port_the_next_free_one_is_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, access = RunCache([run]), ViewAccess("x" * 22)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("rloom.cli.view.FIRST_PORT", port)
        with listen(None, runs, access) as server:
            assert port < server.server_port < port + 20
        monkeypatch.setattr("rloom.cli.view.TRIED_PORTS", 1)
        with pytest.raises(ConfigError, match=rf"ports {port} to {port}: .* choose another --port"):
            listen(None, runs, access)
    assert FIRST_PORT == 8817


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "192.168.1.2"])
def test_another_host_is_refused_with_the_way_out(run: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run), "--host", host]) == 2
    said = capsys.readouterr().err
    assert f"--host {host}: the viewer listens on 127.0.0.1 only" in said and "ssh -L" in said


def test_what_it_prints_is_chinese_in_a_chinese_locale() -> None:
    lines = to_chinese(greeting(1, "t")).splitlines()
    assert lines[0] == "http://127.0.0.1:1/?token=t" and lines[1].startswith("从其他机器访问：ssh -N -L 1:127.0.0.1:1 ")


def test_a_browser_is_opened_only_where_the_user_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert has_display({"DISPLAY": ":0"}) and has_display({"WAYLAND_DISPLAY": "wayland-0"})
    assert not has_display({}) and not has_display({"DISPLAY": ":10", "SSH_CONNECTION": "1.2.3.4 5 6.7.8.9 22"})
    monkeypatch.setattr(sys, "platform", "darwin")
    assert has_display({}) and not has_display({"SSH_CONNECTION": "x"})


def test_the_browser_gets_a_token_that_is_good_for_one_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setenv("RLOOM_VIEW_TOKEN", "a-token-for-tests-only")
    monkeypatch.setattr("rloom.cli.view.has_display", lambda environment: True)
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("rloom.view.server.ViewServer.serve_forever", lambda self: None)
    assert main(["view", str(run), "--port", "0"]) == 0
    (address,) = opened
    assert address.startswith("http://127.0.0.1:") and "a-token-for-tests-only" not in address


def test_it_starts_without_the_libraries_of_training(run: Path) -> None:
    code = """
import sys
from pathlib import Path
from rloom.cli.view import listen
from rloom.view.access import ViewAccess
from rloom.view.run_cache import RunCache
listen(0, RunCache([Path(sys.argv[1])]), ViewAccess("x" * 22)).server_close()
print([name for name in ("torch", "transformers", "numpy", "pyarrow", "pandas") if name in sys.modules])
from rloom.runs.dumps.reader import Dumps
dumps = Dumps(Path(sys.argv[1]))
dumps.prompts("train", 1), dumps.answers("train", 1, 0), dumps.texts("train", 1)
print([name for name in ("torch", "transformers", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=240)
    assert (done.stdout, done.stderr) == ("[]\n[]\n", "")
