"""A group whose workers are other processes: calls of several workers, streams, and the cause of a failure.

How a worker is started and reached is that of its backend: `processes.py` on one machine, `ray.py` on several.
"""

import logging
import math
import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch._C._distributed_c10d import TCPStore

from rloom.errors import RloomError, WorkerError
from rloom.interrupts import outlive_sigterm, sigterm_blocked
from rloom.runtime.failures import CallFailed, Failure, Kind, cause_first, kind_of, portable_errors, wait_for_others_s
from rloom.runtime.group import Arguments, Group, NextItems, Stored, Stream, for_workers, made
from rloom.runtime.nodes import interface_of
from rloom.runtime.process_stats import Machine, ProcessStats

log, calls = logging.getLogger(__name__), logging.getLogger("rloom.calls")
SENDS_AHEAD = 2  # of a stream: a worker has its next items when it has answered the last ones
FIRST_NOTICE_S = 60.0  # after so long without a result, the log names the workers that are waited for
RAY_LINES = (":actor_name:", ":job_id:", ":task_name:")  # lines that Ray adds to a log
LOG_LINES_SHOWN = 15  # of a dead worker
Answer = Future[Any]


class WorkerHost(ABC):
    """In a worker's process: holds one object and calls its methods. Its output goes to a file and to the console."""

    def __init__(
        self, name: str, log_file: Path | None, node: str, make: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        """`node`: an address of this machine that the other workers reach."""
        self.name, self.node = name, node
        outlive_sigterm()
        if log_file is not None:
            copy_output_to(log_file)
            note_calls_in(log_file)
        self.process_stats = ProcessStats(name)
        self.stream: Generator[Any, Any, None] | None = None
        self.stores: list[TCPStore] = []
        # gloo uses the address of the machine's name, which is 127.0.0.1 on many machines
        if "GLOO_SOCKET_IFNAME" not in os.environ and (found := interface_of(node)):
            os.environ["GLOO_SOCKET_IFNAME"] = found
        self.object = make(*arguments)

    def address(self) -> str:
        """host:port of a store that listens, for a process group in which this worker is rank 0."""
        # torch takes a store of this process that listens on the port, instead of one of its own
        store = TCPStore(self.node, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        self.stores.append(store)
        return f"{self.node}:{store.port}"

    def machine(self) -> Machine:
        return Machine.of_this_process(self.node)

    def stats(self) -> dict[str, float]:
        return self.process_stats.metrics()

    def build(self, *arguments: Any) -> Any:
        calls.info("build")
        with portable_errors():
            return self.object.build(*arguments)

    @abstractmethod
    def put(self, value: Any) -> Stored:
        """As a group's: the driver and every worker of its kind read it."""

    def call(self, role: str, method: str, arguments: tuple[Any, ...], first: bool = True, stored: bool = False) -> Any:
        """`first`: of its share, whose result counts; the others send none."""
        calls.info(f"{role}.{method}")
        with portable_errors():
            result = getattr(self.object.roles[role], method)(*made(arguments))
            if not first:
                return None
            return self.put(result) if stored else result

    def open_stream(self, role: str, method: str) -> None:
        calls.info(f"{role}.{method}")
        with portable_errors():
            self.stream = getattr(self.object.roles[role], method)()
            next(self.stream)

    def send(self, items: Sequence[Any]) -> Any:
        assert self.stream is not None
        with portable_errors():
            return self.stream.send(items)

    def close_stream(self) -> None:
        assert self.stream is not None
        with portable_errors():
            self.stream.close()


def copy_output_to(file: Path) -> None:
    """Copy all output of this process, that of native code too. `tee` survives the kill of this process."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with sigterm_blocked():
        tee = subprocess.Popen(["tee", "-a", str(file)], stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    for stream in (1, 2):
        os.dup2(tee.stdin.fileno(), stream)


def note_calls_in(file: Path) -> None:
    """Log every call to the file only: after a worker's death its last call is the most useful fact."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    calls.addHandler(handler)
    calls.setLevel(logging.INFO)
    calls.propagate = False


class RemoteWorker(Protocol):
    """The driver's side of a worker."""

    @property
    def name(self) -> str: ...

    @property
    def log_file(self) -> Path | None: ...

    def submit(self, method: str, *arguments: Any) -> Answer:
        """Call a method of the worker's host. Calls run one after the other, in the order in which they were sent."""

    def put(self, value: Any) -> Stored:
        """As a group's: every worker of its kind reads it."""

    def death(self, error: BaseException) -> WorkerError | None:
        """For the user, if the error of a call means that the worker is gone. None: the call raised it."""


class Waiting:
    """Logs the workers that have not answered for FIRST_NOTICE_S, and again each time that time has doubled."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s  # after which a worker that has not answered counts as dead
        self.since: dict[str, tuple[float, float]] = {}  # by worker: when it was called, seconds until its next notice

    def ready(self, worker_of: Mapping[Answer, RemoteWorker]) -> list[Answer]:
        """The pending answers that have arrived, after waiting for the first. They are no longer waited for."""
        began = time.monotonic()
        for worker in worker_of.values():
            self.since.setdefault(worker.name, (began, FIRST_NOTICE_S))
        while True:
            due = min(since + min(notice_s, self.limit_s) for since, notice_s in self.since.values())
            ready = arrived(worker_of, due - time.monotonic())
            for answer in ready:
                del self.since[worker_of[answer].name]
            self.log_late()
            self.check_limit(worker_of)
            if ready:
                return ready

    def check_limit(self, worker_of: Mapping[Answer, RemoteWorker]) -> None:
        """WorkerError: one has not answered for `limit_s`. The caller may have taken that long to ask for answers."""
        until = time.monotonic() - self.limit_s
        for answer, worker in worker_of.items():
            if not answer.done() and self.since[worker.name][0] <= until:
                raise hung(worker.name, self.limit_s, worker.log_file)

    def log_late(self) -> None:
        now = time.monotonic()
        late = {name: notice_s for name, (since, notice_s) in self.since.items() if now >= since + notice_s}
        if late:
            log.info(f"Waiting for {', '.join(late)} ({max(late.values()):.0f} s)")
        for name, notice_s in late.items():
            self.since[name] = self.since[name][0], 2 * notice_s


@dataclass(frozen=True)
class RemoteCalls:
    """Calls that are running on the workers of a group."""

    group: "RemoteGroup"
    answers: Sequence[Answer]  # one for each worker

    def wait(self) -> list[Any]:
        worker_of = dict(zip(self.answers, self.group.workers, strict=True))
        waiting = Waiting(self.group.limit_s)
        while worker_of:
            for answer in waiting.ready(worker_of):
                worker = worker_of.pop(answer)
                if (error := answer.exception()) is not None:
                    raise self.group.cause(worker, error, worker_of) from error
        return [answer.result() for answer in self.answers[:: self.group.workers_per_share]]


class RemoteGroup(Group):
    """Workers that are called together. When one fails, the call raises the cause and does not wait for the others."""

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        role: str | None,
        *,
        workers_per_share: int = 1,
        limit_s: float = math.inf,  # of each call
    ) -> None:
        assert len(workers) % workers_per_share == 0
        self.workers, self.role, self.workers_per_share, self.limit_s = workers, role, workers_per_share, limit_s

    @property
    def shares(self) -> int:
        return len(self.workers) // self.workers_per_share

    def put(self, value: Any) -> Stored:
        return self.workers[0].put(value)

    def start(self, method: str, arguments: Arguments, *, stored: bool = False) -> RemoteCalls:
        each = zip(self.workers, for_workers(arguments, self.workers_per_share), strict=True)
        if self.role is None:  # methods of the host itself
            return RemoteCalls(self, [worker.submit(method, *own) for worker, own in each])
        answers = [
            worker.submit("call", self.role, method, own, number % self.workers_per_share == 0, stored)
            for number, (worker, own) in enumerate(each)
        ]
        return RemoteCalls(self, answers)

    def stream(self, method: str, next_items: NextItems) -> Stream:
        """Calls of the workers in turn: a worker runs one call at a time, in the order in which they were sent."""
        pending: list[deque[Answer]] = [deque() for _ in self.workers]  # answers of each worker, the oldest first
        waiting = Waiting(self.limit_s)

        def send(share: int) -> None:
            items, first = next_items(share), share * self.workers_per_share
            for number in range(first, first + self.workers_per_share) if items is not None else ():
                pending[number].append(self.workers[number].submit("send", items))

        with self.open_streams(method):
            for share in [*range(self.shares)] * SENDS_AHEAD:
                send(share)
            while any(pending):
                for number, found in self.arrived_answers(pending, waiting):
                    if number % self.workers_per_share == 0:
                        share = number // self.workers_per_share
                        yield share, found
                        send(share)

    @contextmanager
    def open_streams(self, method: str) -> Iterator[None]:
        RemoteCalls(self, [worker.submit("open_stream", self.role, method) for worker in self.workers]).wait()
        worker_failed = False
        try:
            yield
        except RloomError:
            worker_failed = True  # its peers may hang in a collective: they are not called
            raise
        finally:
            if not worker_failed:
                RemoteCalls(self, [worker.submit("close_stream") for worker in self.workers]).wait()

    def arrived_answers(self, pending: Sequence[deque[Answer]], waiting: Waiting) -> Iterator[tuple[int, Any]]:
        """Waits for the first; (number of the worker, its answer) of one that is no longer pending.

        All that have arrived, since to wait costs the driver as much time as there are workers, and no worker may wait
        until those before it have no answer.
        """
        number_of = {answers[0]: number for number, answers in enumerate(pending) if answers}
        for ready in waiting.ready({answer: self.workers[number] for answer, number in number_of.items()}):
            number = number_of[ready]
            pending[number].popleft()
            if (error := ready.exception()) is not None:
                raise self.cause(self.workers[number], error, {}) from error
            yield number, ready.result()

    def cause(self, failed: RemoteWorker, error: BaseException, waiting: Mapping[Answer, RemoteWorker]) -> RloomError:
        """Why the group failed. `failed` was the first to report; `waiting`: pending answers of the others.

        A worker whose peer died, or that raised because of it, may report before that peer. One that hangs in a
        collective with a failed peer never answers: it is waited for as long as a likelier cause may arrive.
        """
        failures, began = [failure_of(failed, error)], time.monotonic()
        known = {failed.name, *(worker.name for worker in waiting.values())}
        # a worker that has returned its result may have died since
        pending = {**waiting, **{one.submit("stats"): one for one in self.workers if one.name not in known}}
        while pending and (left_s := began + wait_for_others_s(failures) - time.monotonic()) > 0:
            for answer in arrived(pending, left_s):
                worker = pending.pop(answer)
                if (other := answer.exception()) is not None:
                    failures.append(failure_of(worker, other))
        return cause_first(failures)


def arrived(answers: Iterable[Answer], timeout_s: float) -> list[Answer]:
    """The answers that are there, in order, after waiting for the first of them."""
    answers = list(answers)
    done = wait_for(answers, timeout=max(timeout_s, 0.0), return_when=FIRST_COMPLETED).done
    return [answer for answer in answers if answer in done]


def failure_of(worker: RemoteWorker, error: BaseException) -> Failure:
    kind = Kind.RAISED
    shown: RloomError
    if (death := worker.death(error)) is not None:
        kind, shown = Kind.DIED, death
    elif isinstance(error, RloomError):
        kind, shown = kind_of(str(error)), type(error)(f"{worker.name}: {error}")
    elif isinstance(error, CallFailed):
        trace = "" if error.out_of_memory else f"\n{error.trace.rstrip()}"
        text = f"{worker.name} failed: {error.what}{trace}{last_log_lines(worker.log_file)}"
        kind, shown = kind_of(error.what), WorkerError(text, out_of_memory=error.out_of_memory)
    else:  # arguments that cannot be unpickled
        shown = WorkerError(f"{worker.name} failed: {error}{last_log_lines(worker.log_file)}")
    shown.worker = worker.name
    return Failure(kind, shown)


def died(name: str, reason: str, log_file: Path | None = None) -> WorkerError:
    return WorkerError(f"{name} died. {reason}{last_log_lines(log_file)}", lost=True)


def hung(name: str, limit_s: float, log_file: Path | None) -> WorkerError:
    error = WorkerError(
        f"{name} counts as dead: it has not reported for actor_rollout_ref.rollout.progress_timeout_s={limit_s:g} s. "
        f"Raise the key if its engine needs longer{last_log_lines(log_file)}",
        lost=True,
    )
    error.worker = name
    return error


def could_not_begin(name: str, reason: str, log_file: Path | None = None) -> WorkerError:
    """Not lost: to begin again would end the same."""
    return WorkerError(f"{name} could not begin: {reason}{last_log_lines(log_file)}")


def last_log_lines(log_file: Path | None) -> str:
    if log_file is None or not log_file.is_file():
        return ""
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if not line.startswith(RAY_LINES)]
    lines = lines[-LOG_LINES_SHOWN:]
    return "\n".join([f"\nIts last lines ({log_file}):", *(f"  {line}" for line in lines)]) if lines else ""
