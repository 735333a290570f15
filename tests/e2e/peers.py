"""A worker without a model, which does as it is told. Imported by worker processes."""

import os
import signal
import subprocess
import time
from collections.abc import Generator

KILLED = "killed"  # instead of an error


class Peer:
    def __init__(self) -> None:
        self.roles = {"actor": self}

    def act(self, wait_s: float, error: str | None) -> str:
        time.sleep(wait_s)
        if error == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if error is not None:
            raise Strange(error, len(error))
        return "done"

    def end_a_child(self) -> int:
        """The exit status of a program that this process starts and terminates."""
        with subprocess.Popen(["sleep", "60"]) as child:
            child.terminate()
            return child.wait(30)

    def act_stream(self) -> Generator[list[str], list[str | None], None]:
        """Sent what to raise, or None: acts for each."""
        done: list[str] = []
        while True:
            errors = yield done
            done = [self.act(0, error) for error in errors]

    def echo_stream(self) -> Generator[list[str], list[str], None]:
        items: list[str] = []
        while True:
            items = yield items


class Strange(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, text: str, length: int) -> None:
        super().__init__(text)
