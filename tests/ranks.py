"""Real processes that meet in process groups, for tests of what only several ranks do."""

import io
import socket
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing

from rloom.engines.distributed import join, leave

# (rank, ranks, *arguments), importable by name: the processes are new ones
Work = Callable[..., Any]
PRELOADED = ["rloom.launch.run", "tests.engine_subjects"]
if find_spec("megatron") is not None:
    PRELOADED.append("rloom.engines.megatron.core")


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def forkserver() -> Any:
    """Starts processes that have imported everything already: that takes longer than most of what they do."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankProcesses:
    """Processes that stay from one test to the next."""

    def __init__(self, size: int, device: str = "cpu", context: Any = None) -> None:
        """On "cuda:0" all of them share that GPU. `context`: of multiprocessing, `forkserver` unless given."""
        self.size, self.device, self.context = size, torch.device(device), context or forkserver()
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def run(self, ranks: int, work: Work, *arguments: Any, timeout_s: float = 480) -> list[Any]:
        """What `work` returns on each rank of a new process group."""
        if not self.processes:
            self.start()
        port = free_port()
        try:
            for rank in range(ranks):
                self.pipes[rank].send((rank, ranks, port, work, arguments))
            return self.gather(ranks, time.monotonic() + timeout_s)
        except BaseException:
            self.close()  # the other ranks may wait for the one that failed
            raise

    def start(self) -> None:
        for _ in range(self.size):
            here, there = self.context.Pipe()
            process = self.context.Process(target=serve, args=(there, self.device), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(here)

    def gather(self, ranks: int, until: float) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < ranks:
            waiting = [self.pipes[rank] for rank in range(ranks) if rank not in found]
            ready = wait(waiting, max(0.0, until - time.monotonic()))
            assert ready, f"ranks {[self.pipes.index(pipe) for pipe in waiting]} did not end in time"
            for rank in (rank for rank in range(ranks) if self.pipes[rank] in ready):
                failure, found[rank] = torch.load(io.BytesIO(self.pipes[rank].recv_bytes()), weights_only=False)
                assert failure is None, f"rank {rank}: {failure}"
        return [found[rank] for rank in range(ranks)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []


def serve(pipe: Connection, device: torch.device) -> None:
    torch.set_num_threads(1)
    while True:
        rank, ranks, port, work, arguments = pipe.recv()
        answer = io.BytesIO()
        try:
            join(rank, ranks, address=f"127.0.0.1:{port}", device=device, shared=True, timeout_s=300)
            torch.save((None, work(rank, ranks, *arguments)), answer)
            leave()
        except BaseException:  # whatever it is, the test shows it
            torch.save((traceback.format_exc(), None), answer)
        pipe.send_bytes(answer.getvalue())
