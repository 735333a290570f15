"""Workers of one machine as processes of their own, forked from `fork_server.py`. Nothing but Python is needed."""

import faulthandler
import io
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rloom.errors import RloomError, WorkerError
from rloom.runtime.failures import CallFailed, portable_errors
from rloom.runtime.fork_server import EXIT_TIMEOUT_S, THREADS, fork_server
from rloom.runtime.group import Stored
from rloom.runtime.pickling import SharedMemory, TensorPickler
from rloom.runtime.remote import Answer, WorkerHost, could_not_begin, died

NODE = "127.0.0.1"  # the workers' process groups do not leave this machine
BEGIN = 0  # number of the call that makes the worker's object; the driver is only told of its failure
NUMBER_BYTES = 8
OUTPUT_S = 1.0  # a child of a worker may hold its output open


class Died(Exception):
    """The worker's process has ended before it answered."""


class ForkedWorker:
    """The driver's side of a worker. Threads send and receive, so that neither side waits for the other to read."""

    def __init__(
        self,
        name: str,
        log_file: Path | None,
        variables: Mapping[str, str],
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        timeout_s: float,
    ) -> None:
        """`variables`: of its environment, beside those of this process."""
        self.name, self.log_file = name, log_file
        own, other = socket.socketpair()
        output, written = os.pipe()
        self.exited = threading.Event()
        self.status: int | None = None
        self.begin_error: str | None = None
        self.pending: dict[int, Answer] = {}
        self.calls, self.lock, self.alive = 0, threading.Lock(), True
        self.loaded = BEGIN  # number of the last call whose answer was loaded, and what is stored of it opened
        self.outgoing: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self.connection = Connection(own.detach())
        self.server = fork_server()
        try:
            with other:
                self.pid = self.server.fork((other.fileno(), written), self.on_exit, timeout_s)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(written)
        self.outgoing.put(pickle.dumps(({**THREADS, **os.environ, **variables}, os.getcwd(), sys.path, name, log_file)))
        self.outgoing.put(pickle.dumps((make, arguments)))
        self.shown = threading.Thread(target=show_output, args=(output, f"({name} pid={self.pid})"), daemon=True)
        for thread in (self.shown, *(threading.Thread(target=work, daemon=True) for work in (self.send, self.receive))):
            thread.start()

    def submit(self, method: str, *arguments: Any) -> Answer:
        answer: Answer = Answer()
        with self.lock:
            if not self.alive:
                answer.set_exception(Died())
                return answer
            self.calls += 1
            message = numbered(self.calls, (method, arguments, self.loaded))
            self.pending[self.calls] = answer
            self.outgoing.put(message)
        return answer

    def put(self, value: Any) -> Stored:
        return SharedMemory(value)

    def send(self) -> None:
        with suppress(OSError):  # it has died; `receive` learns so, too
            while (message := self.outgoing.get()) is not None:
                self.connection.send_bytes(message)

    def receive(self) -> None:
        try:
            with suppress(OSError, EOFError):
                while True:
                    self.take(self.connection.recv_bytes())
        finally:
            self.exited.wait(EXIT_TIMEOUT_S)  # its status is for the message,
            self.shown.join(OUTPUT_S)  # and so are its last lines
            with self.lock:
                self.alive = False
                left, self.pending = list(self.pending.values()), {}
            self.outgoing.put(None)
            for answer in left:
                answer.set_exception(Died())

    def take(self, message: bytes) -> None:
        number, load = opened(message)
        answer = self.pending.pop(number, None)
        try:
            with portable_errors():
                error, result = load()
        except (RloomError, CallFailed) as not_loaded:
            error, result = not_loaded, None
        self.loaded = number
        if answer is None:
            self.begin_error = result
        elif error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def on_exit(self, status: int | None) -> None:
        """None: the fork server has ended, and its children with it."""
        self.status = status
        self.exited.set()
        with suppress(OSError):  # a child of the worker may hold the other end: what was sent is read, then it ends
            end = socket.socket(fileno=os.dup(self.connection.fileno()))
            with end:
                end.shutdown(socket.SHUT_RDWR)

    def death(self, error: BaseException) -> WorkerError | None:
        if not isinstance(error, Died):
            return None
        if self.begin_error is not None:
            return could_not_begin(self.name, self.begin_error, self.log_file)
        return died(self.name, f"Its process {self.pid} {describe(self.status)}.", self.log_file)

    def kill(self) -> None:
        self.server.kill(self.pid)


def describe(status: int | None) -> str:
    if status is None or status >= 0:
        return "exited" if status is None else f"exited with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if name == "SIGKILL":
        return f"exited, ended by {name}; Linux sends it when the machine's memory is used up"
    return f"exited, ended by {name}"


def kill_workers(workers: Sequence[ForkedWorker]) -> None:
    """They have ended when this returns, and what they printed is shown."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.exited.wait(EXIT_TIMEOUT_S)
        worker.shown.join(OUTPUT_S)


def show_output(output: int, prefix: str) -> None:
    """Reads to the end, whatever becomes of this process's output: a worker must not fail for what it prints."""
    with os.fdopen(output, "rb") as lines:
        for line in lines:
            text = f"{prefix} {line.decode(errors='replace').rstrip()}"
            with suppress(ValueError, OSError):  # closed
                try:
                    print(text, flush=True)
                except UnicodeEncodeError:
                    print(ascii(text)[1:-1], flush=True)


def run_worker(calls: int) -> None:
    """In the worker's process: answer calls, until the driver ends it or has ended."""
    faulthandler.enable(file=2, all_threads=False)  # where a segmentation fault was
    for stream in (sys.stdout, sys.stderr):  # the driver ends a worker without warning: what it printed is kept
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    connection = Connection(calls)
    variables, folder, path, name, log_file = pickle.loads(connection.recv_bytes())
    np.random.seed()  # a user's code in the workers would draw the same numbers in each: forks share the state
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path += [place for place in path if place not in sys.path]  # last: no file there replaces another module
    try:
        make, arguments = pickle.loads(connection.recv_bytes())
        host = ForkedHost(name, log_file, NODE, make, arguments)
    except Exception as error:
        traceback.print_exc()
        connection.send_bytes(numbered(BEGIN, (None, f"{type(error).__name__}: {error}")))
        return
    with suppress(EOFError, BrokenPipeError):
        while True:
            answer(connection, host, connection.recv_bytes())


class ForkedHost(WorkerHost):
    """A value that it has put stays until the driver has opened it too."""

    def __init__(self, *arguments: Any) -> None:
        self.number = BEGIN  # of the call under way
        self.unopened: list[tuple[int, SharedMemory]] = []  # with the number of the call that put it
        super().__init__(*arguments)

    def put(self, value: Any) -> Stored:
        stored = SharedMemory(value)
        self.unopened.append((self.number, stored))
        return stored

    def begin_call(self, number: int, loaded: int) -> None:
        """`loaded`: number of the last call whose answer the driver has loaded."""
        self.number = number
        self.unopened = [(of_call, stored) for of_call, stored in self.unopened if of_call > loaded]


def answer(connection: Connection, host: ForkedHost, message: bytes) -> None:
    number, load = opened(message)
    try:
        with portable_errors():  # also of what cannot be pickled
            method, arguments, loaded = load()
            host.begin_call(number, loaded)
            reply = numbered(number, (None, getattr(host, method)(*arguments)))
    except (RloomError, CallFailed) as error:
        reply = numbered(number, (portable(error), None))
    connection.send_bytes(reply)


def portable(error: RloomError | CallFailed) -> RloomError | CallFailed:
    """The error itself if the driver can load it: one of a user's own classes may hold anything."""
    try:
        if type(error).__module__.partition(".")[0] == "rloom":
            pickle.dumps(error)
            return error
    except Exception:
        pass
    return CallFailed(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)), False)


def numbered(number: int, content: Any) -> memoryview:
    message = io.BytesIO()
    message.write(number.to_bytes(NUMBER_BYTES, "little"))
    TensorPickler(message, pickle.HIGHEST_PROTOCOL).dump(content)
    return message.getbuffer()


def opened(message: bytes) -> tuple[int, Callable[[], Any]]:
    """The number of a call, and a function that unpickles the rest."""
    rest = memoryview(message)[NUMBER_BYTES:]
    return int.from_bytes(message[:NUMBER_BYTES], "little"), lambda: pickle.loads(rest)


def lost_cuda() -> bool:
    """Whether a library has initialised CUDA when the fork server imported it: a fork cannot use it any more."""
    lost: bool = torch.cuda._is_in_bad_fork()
    return lost
