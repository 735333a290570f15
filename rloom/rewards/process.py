"""One reward worker process, as the pool uses it: start, send requests, end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from typing import IO

from rloom.errors import RewardError
from rloom.import_path import child_command
from rloom.rewards.messages import Progress, Refusal, Reply, Setup, Style, decode, encode
from rloom.terminal import printable
from rloom.types import Score

EXIT_GRACE_S = 2.0  # for a worker to flush the open files of the user's code before it is killed
STDERR_LINES = 5  # of a dead worker, quoted in the reason
RECEIVE_BYTES = 1 << 16


class WorkerDied(Exception):
    """The process ended during a request."""


class WorkerProcess:
    """One process, started by the constructor.

    It runs in a new session: Ctrl-C does not reach it, and a kill also ends its child processes. The connection is a
    socket: its end of file ends the worker when this process dies, even after kill -9.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                child_command("rloom.rewards.pool_worker"),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                # one thread for NumPy or torch in the user's code: generation needs the other cores
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        except OSError as error:  # no memory, no file descriptors, no processes left
            self._socket.close()
            raise RewardError(f"a reward worker could not be started: {error}") from error
        finally:
            theirs.close()
        self._received = b""  # of the next replies
        assert self._process.stderr is not None  # it is a pipe
        self._last_lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._stderr_thread = threading.Thread(
            target=self._forward_stderr, args=(self._process.stderr,), name="reward-stderr", daemon=True
        )
        self._stderr_thread.start()

    def load(self) -> Style:
        """Wait until the function is loaded, and return how it is called."""
        limit_s = self._setup.load_limit_s
        what = "the reward rules" if self._setup.path is None else f"custom_reward_function.path={self._setup.path!r}"
        try:
            self._send(encode(self._setup), limit_s)
            reply = self._receive(limit_s)
        except TimeoutError:
            raise RewardError(f"{what}: not loaded after {limit_s:g} s; move slow code into the function") from None
        except WorkerDied as error:
            raise RewardError(f"{what}: {error}, while loading") from None
        if isinstance(reply, Refusal):
            raise RewardError(reply.message)
        assert isinstance(reply, Style)
        return reply

    def send(self, request: bytes) -> None:
        """Send an encoded Request. After a TimeoutError or WorkerDied this worker cannot be used again."""
        self._send(request, self._setup.timeout_s)

    def receive_scores(self, limit_s: float) -> list[Score]:
        """The scores of the next group of the request. Fails like `send`."""
        reply = self._receive(limit_s)
        while isinstance(reply, Progress):
            loading = reply is Progress.LOADING
            reply = self._receive(self._setup.load_limit_s if loading else limit_s)
        assert isinstance(reply, list)
        return reply

    def interrupt(self) -> None:
        """Called from another thread: a thread that waits for this worker gets WorkerDied at once."""
        with contextlib.suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, *, grace_s: float = EXIT_GRACE_S) -> int:
        """End the process and its process group, and return its exit code. May be called again."""
        if self._process.returncode is not None:
            return self._process.returncode
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        # the worker leads its process group, which may contain processes started by the user's code
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._stderr_thread.join(timeout=EXIT_GRACE_S)
        return code

    def _send(self, message: bytes, limit_s: float) -> None:
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def _receive(self, limit_s: float) -> Reply:
        deadline = time.monotonic() + limit_s

        def receive(count: int) -> bytes:
            if not self._received:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError
                self._socket.settimeout(remaining_s)
                self._received = self._socket.recv(RECEIVE_BYTES)
            part, self._received = self._received[:count], self._received[count:]
            return part

        try:
            return decode(receive)  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            raise self._died() from None

    def _died(self) -> WorkerDied:
        code = self.close()
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        lines = " | ".join(self._last_lines)
        return WorkerDied(f"the reward worker {how}" + (f"; its last lines: {lines}" if lines else ""))

    def _forward_stderr(self, stream: IO[bytes]) -> None:
        """Print the output of the user's code with Python, so that a progress display is redrawn around it."""
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                print(printable(line), file=sys.stderr)  # it may quote answers
