"""Workers of each backend, for the tests that all of them pass."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rloom.runtime import processes
from rloom.runtime.nodes import head_node
from rloom.runtime.remote import RemoteWorker
from tests.ranks import free_port

PROCESSES, RAY = "processes", "ray"
Backend = Callable[..., Any]  # `started` of one backend


@contextmanager
def started_processes(
    make: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], logs: Path | None = None
) -> Iterator[list[RemoteWorker]]:
    """A worker for each tuple of arguments."""
    workers = list[processes.ForkedWorker]()
    try:
        for number, own in enumerate(arguments):
            log_file = None if logs is None else logs / f"{number}.log"
            workers.append(processes.ForkedWorker(f"worker {number}", log_file, {}, make, own, timeout_s=300))
        yield list(workers)
    finally:
        processes.kill_workers(workers)


@contextmanager
def started_actors(
    address: str, make: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], logs: Path | None = None
) -> Iterator[list[RemoteWorker]]:
    from rloom.runtime import ray as cluster

    with (
        cluster.connect({"address": address}, cpus=1),
        cluster.reserve(1, {"CPU": len(arguments)}, timeout_s=300) as share,
    ):
        actors = [
            cluster.start_worker(
                share, 0, {"CPU": 1}, (f"worker {number}", None if logs is None else logs / f"{number}.log"), make, own
            )
            for number, own in enumerate(arguments)
        ]
        yield list(actors)
        cluster.kill_workers(actors)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A cluster of one machine, with more cores for Ray than it has."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # Ray looks when it is imported
    pytest.importorskip("ray")
    address = f"127.0.0.1:{free_port()}"
    with head_node(address, cpus=4, gpus=0):  # Ray starts a process for each
        yield address


@pytest.fixture(params=[PROCESSES, pytest.param(RAY, marks=pytest.mark.long)])  # Ray takes ten seconds for each
def started(request: pytest.FixtureRequest) -> Backend:
    """`with started(make, arguments, logs) as workers`"""
    if request.param == PROCESSES:
        return started_processes
    address = request.getfixturevalue("ray_address")
    return lambda *given: started_actors(address, *given)
