"""Process groups of the trainer and one server: where they meet, and what happens if the server does not come."""

import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import TCPStore

from rloom.engines.distributed import NamedGroup

T = TypeVar("T")


@dataclass(frozen=True)
class ServerRendezvous:
    name: str
    host: str  # of the trainer, as the server reaches it
    port: int
    store: TCPStore  # it listens on the port; the group takes it

    @classmethod
    def for_server(cls, url: str) -> "ServerRendezvous":
        parts = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
            host = probe.getsockname()[0]
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return cls(f"rloom_{uuid.uuid4().hex[:12]}", host, store.port, store)

    def join(
        self, answer: "Future[bytes]", server_ranks: int, *, backend: str, device: torch.device, timeout_s: float
    ) -> NamedGroup:
        """`answer`: of the request that makes the server join."""
        address = f"{self.host}:{self.port}"
        return run_beside(
            answer,
            lambda: NamedGroup(
                self.name,
                0,
                1 + server_ranks,
                address=address,
                backend=backend,
                device=device,
                timeout_s=timeout_s,
            ),
        )


def backend_for(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def run_beside(
    answer: "Future[bytes]", collective: Callable[[], T], check: Callable[["Future[bytes]"], object] = Future.result
) -> T:
    """The result of a collective in which the server takes part while it computes `answer`.

    An answer for which `check` raises ends the wait: the collective would wait for the server until its time limit.
    """
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(collective())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, name="collective", daemon=True).start()
    pending: list[Future[Any]] = [answer, found]
    wait(pending, return_when=FIRST_COMPLETED)
    if answer.done():
        check(answer)
    return found.result()
