"""The process of a server that rloom starts: its command, port, log file and end."""

import atexit
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from rloom.import_path import OWN_FOLDER, child_command

STOP_S = 20.0  # for a server to end after SIGTERM
TAIL_LINES = 15
HOST = "127.0.0.1"
SERVER_PORTS = (20_000, 32_000)  # Linux gives connections those from 32,768 on
PORT, MODEL = "{port}", "{model}"  # in a command of the user's


@dataclass(frozen=True)
class Launch:
    """How a server is started, again and again if need be."""

    command: Sequence[str]  # with PORT where the port belongs
    environment: Mapping[str, str]  # beside that of this process
    log_file: Path


class ServerProcess:
    def __init__(self, launch: Launch) -> None:
        self.launch, self.port = launch, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """In the main thread or one that runs as long: the server ends with the thread that started it."""
        command = [word.replace(PORT, str(self.port)) for word in self.launch.command]
        guard = child_command("rloom.rollout.servers.child", str(os.getpid()))
        folders = os.pathsep.join(filter(None, (OWN_FOLDER, os.environ.get("PYTHONPATH"))))
        # another environment has packages of its own, of other versions
        path = {"PYTHONPATH": folders} if command[0] == sys.executable else {}
        self.launch.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.launch.log_file.open("ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                [*guard, *command],
                env={**os.environ, **path, **self.launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """The server and its own processes."""
        process, self.process = self.process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):  # what is left of its group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log_tail(self) -> str:
        lines = self.launch.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


def free_port() -> int:
    """A port that no process listens on, below those that the system gives to connections: one of these could take it
    before the server has started."""
    while True:
        port = SystemRandom().randrange(*SERVER_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port


def own_command(command: str, model: str) -> list[str]:
    """The command of the user, word by word."""
    return [word.replace(MODEL, model) for word in shlex.split(command)]
