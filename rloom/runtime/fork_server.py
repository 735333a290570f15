"""The process that the workers of this machine are forked from. It has imported what they need, and nothing else.

Importing torch and transformers takes seconds; this process does it once, beside the driver, for all workers and their
restarts. It never initialises CUDA, so that each worker may choose its GPU. It ends with the driver, and the workers
with it, also after kill -9. Nothing listens: the driver, this process and the workers share pairs of sockets.
"""

import atexit
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from importlib import import_module

from rloom.errors import WorkerError
from rloom.import_path import child_command
from rloom.interrupts import sigterm_blocked

WORKER = "rloom.runtime.processes"  # the side of a worker; it imports torch, which this module does not
PRELOADED = ("rloom.launch.worker", WORKER)  # modules that a worker imports
FORK, KILL, STARTED, EXITED = "fork", "kill", "started", "exited"
SERVE, WORK = "serve", "work"
SET_PARENT_DEATH_SIGNAL = 1  # of prctl, on Linux
EXIT_TIMEOUT_S, CLOSE_S = 30.0, 1.0
# as in a worker of Ray, which has one core: more threads in each of many processes only wait for each other
THREADS = {"OMP_NUM_THREADS": "1"}
# is_available() would otherwise initialise CUDA, which cannot be used in a fork of the process any more
WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# beginnings of variables that libraries read when they are imported
READ_BY_IMPORTS = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "LD_", "PYTHON", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NCCL_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "RLOOM_"),
)


OnExit = Callable[[int | None], None]  # called with a worker's exit status; None: it is not known


def end_with_parent(parent: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has died before
        os._exit(1)


class ForkServer:
    """The driver's side: starts the process, has workers forked, and learns how they end."""

    def __init__(self) -> None:
        self.control, other_end = socket.socketpair()
        self.variables = import_variables()
        self.lock = threading.Lock()  # one fork at a time
        self.started: Future[int] = Future()
        self.forked_on_exit: OnExit = lambda status: None
        self.on_exit: dict[int, OnExit] = {}
        self.ended = False
        process: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self.run, args=(other_end, process), daemon=True).start()
        self.process = process.result()

    def fork(self, fds: tuple[int, int], on_exit: OnExit, timeout_s: float) -> int:
        """The process id of a new worker with these file descriptors: its socket, its output."""
        with self.lock:
            self.started, self.forked_on_exit = Future(), on_exit
            try:
                socket.send_fds(self.control, [f"{FORK}\n".encode()], fds)
                return self.started.result(0 if self.ended else timeout_s)
            except BaseException as error:  # also Ctrl-C: the answer to this request would be taken for the next one's
                has_ended = self.ended
                self.close()
                if not isinstance(error, NotInTime | OSError):
                    raise
                raise WorkerError(
                    "the process that starts the workers has ended; its error is above"
                    if has_ended
                    else f"after trainer.start_timeout_s={timeout_s:g} the workers' libraries are not imported"
                ) from None

    def kill(self, pid: int) -> None:
        with suppress(OSError):  # it has ended, and the workers with it
            self.control.sendall(f"{KILL} {pid}\n".encode())

    def run(self, other_end: socket.socket, process: "Future[subprocess.Popen[bytes]]") -> None:
        """In a thread of its own: Linux ends the process with the thread that has started it, and the run's thread may
        end before those of others that have workers here."""
        arguments = (SERVE, str(other_end.fileno()), str(os.getpid()))
        try:
            with other_end, sigterm_blocked():  # a new session: Ctrl-C is for the driver, which finishes its step
                started = subprocess.Popen(
                    child_command(__name__, *arguments),
                    env={**THREADS, **os.environ, **WITHOUT_CUDA},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[other_end.fileno()],
                    start_new_session=True,
                )
        except BaseException as error:
            process.set_exception(error)
            return
        process.set_result(started)
        self.receive()

    def receive(self) -> None:
        try:
            with suppress(OSError), self.control.makefile("r") as lines:
                for line in lines:
                    what, pid, *status = line.split()
                    if what == STARTED:
                        self.on_exit[int(pid)] = self.forked_on_exit
                        self.started.set_result(int(pid))
                    else:
                        self.on_exit.pop(int(pid))(int(status[0]))
        finally:
            self.ended = True
            if not self.started.done():
                self.started.set_exception(OSError())
            for on_exit in self.on_exit.values():
                on_exit(None)

    def close(self) -> None:
        with suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # it is importing
            self.process.kill()
            self.process.wait()
        self.control.close()


_server: ForkServer | None = None
_starting = threading.Lock()


def import_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_BY_IMPORTS)}


def fork_server(*, begins_run: bool = False) -> ForkServer:
    """That of this process. The earlier it is started, the more of its imports run beside those of the driver.

    `begins_run`: one that has imported its libraries with other variables, before the last run of a notebook, is
    replaced. Later calls take it as it is: imports of the driver set variables, too.
    """
    global _server
    with _starting:
        if _server is not None and begins_run and _server.variables != import_variables():
            if not _server.on_exit:  # otherwise a run of another thread has workers there
                _server.close()
            _server = None
        if _server is None or _server.ended or _server.process.poll() is not None:
            _server = ForkServer()
            atexit.register(_server.close)
        return _server


def main() -> None:
    """The process itself, or a worker that could not be forked."""
    role, *numbers = sys.argv[1:]
    if role == SERVE:
        control, driver = map(int, numbers)
        end_with_parent(driver)
        for module in PRELOADED:
            import_module(module)
        serve(socket.socket(fileno=control))
    else:
        work(int(numbers[0]))


def serve(control: socket.socket) -> None:
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    workers: set[int] = set()
    begun = b""  # the beginning of a line whose rest has not been read
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            wake.recv(1024)
            report_exits(control, workers)
        if control in ready:
            text, fds, _, _ = socket.recv_fds(control, 1024, 2)
            if not text:
                break
            *lines, begun = (begun + text).split(b"\n")
            for line in lines:
                what, *numbers = line.decode().split()
                if what == FORK:
                    sys.stdout.flush()  # what an import has printed is not each worker's
                    sys.stderr.flush()
                    server, pid = os.getpid(), os.fork()
                    if pid == 0:
                        become_worker(server, (control, wake, woken), fds)
                    workers.add(pid)
                    for fd in fds:
                        os.close(fd)
                    control.sendall(f"{STARTED} {pid}\n".encode())
                elif int(numbers[0]) in workers:
                    os.kill(int(numbers[0]), signal.SIGKILL)
    for pid in workers:  # the driver has ended
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def report_exits(control: socket.socket, workers: set[int]) -> None:
    for pid in list(workers):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            workers.remove(pid)
            with suppress(OSError):
                control.sendall(f"{EXITED} {pid} {os.waitstatus_to_exitcode(status)}\n".encode())


def become_worker(server: int, inherited: tuple[socket.socket, ...], fds: list[int]) -> None:
    """In the forked process. Does not return."""
    try:
        end_with_parent(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in inherited:
            one.close()
        calls, output = fds
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        if import_module(WORKER).lost_cuda():
            os.set_inheritable(calls, True)
            command = child_command(__name__, WORK, str(calls))
            os.execv(command[0], command)
        work(calls)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def work(calls: int) -> None:
    import_module(WORKER).run_worker(calls)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
