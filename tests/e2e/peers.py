"""A worker without a model, which does as it is told. Imported by the processes of Ray."""

import os
import signal
import time

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

    def write(self, wait_s: float, error: str | None) -> "list[str]":
        return [self.act(wait_s, error)]


class Strange(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, text: str, length: int) -> None:
        super().__init__(text)
