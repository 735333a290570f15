"""A worker without a model, which does as it is told. Imported by worker processes."""

import os
import signal
import subprocess
import time
from collections.abc import Generator

import torch

from rloom.engines.distributed import Broadcast, join
from rloom.runtime.group import Stored

KILLED, HANGS = "killed", "hangs"  # instead of an error


class Peer:
    def __init__(self) -> None:
        self.roles = {"actor": self}

    def act(self, wait_s: float, error: str | None) -> str:
        time.sleep(wait_s)
        if error == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if error == HANGS:
            signal.pause()
        if error is not None:
            raise Strange(error, len(error))
        return "done"

    def meet(self, rank: int, address: str, channel_address: str) -> tuple[list[float], list[float]]:
        """What two workers have after a sum over their process group, and after a broadcast over a channel."""
        cpu, sum_2 = torch.device("cpu"), torch.tensor([rank, 1.0])
        join(rank, 2, address=address, device=cpu)
        torch.distributed.all_reduce(sum_2)
        sent_1 = torch.tensor([5.0 - rank])
        Broadcast(rank, 2, address=channel_address, device=cpu).broadcast(sent_1)
        return sum_2.tolist(), sent_1.tolist()

    def numbers(self, count: int) -> torch.Tensor:
        return torch.arange(count)

    def total(self, stored: Stored) -> int:
        return int(stored.get().sum())

    def memory_files(self) -> int:
        """Of this process: memory that it shares."""
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
        return sum("memfd:rloom" in link for link in links)

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
