"""One reward worker process, as the pool uses it: start, send requests, end. All of it in one event loop."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque

from rloom.errors import RewardError
from rloom.import_path import child_command
from rloom.rewards.base import FrameBuffer, LoadProgress, Refusal, Reply, Setup, Style, encode
from rloom.terminal import printable
from rloom.types import Score

EXIT_GRACE_S = 2.0  # for a worker to flush the open files of the user's code before it is killed
EXIT_POLL_S = 0.002
READ_S = 0.002  # after a time limit, for the event loop to read what arrived while other code blocked it
STDERR_LINES = 5  # of a dead worker, quoted in the reason


class WorkerDied(Exception):
    """The process ended during a request."""


class WorkerProcess(asyncio.Protocol):
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
        self._transport: asyncio.Transport | None = None
        self._stderr = ForwardedLines()
        self._frames = FrameBuffer()
        self._replies: deque[Reply] = deque()
        self._has_ended = False
        self._arrival: asyncio.Future[None] | None = None  # the next replies are waited for

    def data_received(self, data: bytes) -> None:
        self._replies.extend(self._frames.messages(data))
        if self._replies:  # a long reply arrives in pieces
            self._notify()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended = True
        self._notify()

    def _notify(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def load(self) -> Style:
        """Wait until the function is loaded, and return how it is called."""
        limit_s = self._setup.load_limit_s
        what = "the reward rules" if self._setup.path is None else f"custom_reward_function.path={self._setup.path!r}"
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self._stderr, self._process.stderr)
        self._transport, _ = await loop.create_connection(lambda: self, sock=self._socket)
        try:
            self._transport.write(encode(self._setup))
            reply = await self._receive(limit_s)
        except TimeoutError:
            raise RewardError(f"{what}: not loaded after {limit_s:g} s; move slow code into the function") from None
        except WorkerDied as error:
            raise RewardError(f"{what}: {error}, while loading") from None
        if isinstance(reply, Refusal):
            raise RewardError(reply.message)
        assert isinstance(reply, Style)
        return reply

    def send(self, request: bytes) -> None:
        """Send an encoded Request. The limit of its first group includes the time for that."""
        assert self._transport is not None  # loaded
        self._transport.write(request)

    async def receive_scores(self, limit_s: float) -> list[Score]:
        """The scores of the next group of the request. After a TimeoutError or WorkerDied this worker cannot be used
        again."""
        reply = await self._receive(limit_s)
        while isinstance(reply, LoadProgress):
            loading = reply is LoadProgress.LOADING
            reply = await self._receive(self._setup.load_limit_s if loading else limit_s)
        assert isinstance(reply, list)
        return reply

    async def gather_replies(self, pause_s: float) -> None:
        """Let replies arrive in the socket, to read several at a time."""
        assert self._transport is not None  # loaded
        if not self._replies and not self._has_ended:
            self._transport.pause_reading()
            await asyncio.sleep(pause_s)
            if not self._has_ended:
                self._transport.resume_reading()

    async def close(self, *, grace_s: float = EXIT_GRACE_S) -> int:
        """End the process and its process group, and return its exit code. May be called again."""
        if self._process.returncode is not None and self._stderr.has_ended:
            return self._process.returncode
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()
        try:
            await self._exit(grace_s)
        finally:  # also if this call is cancelled
            # the worker leads its process group, which may contain processes started by the user's code
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = await self._exit(None)
        assert code is not None
        await self._stderr.finish(self._process, EXIT_GRACE_S)
        return code

    async def _exit(self, limit_s: float | None) -> int | None:
        """The exit code. None: it still runs after `limit_s`."""
        until_s = None if limit_s is None else time.monotonic() + limit_s
        await asyncio.sleep(0)  # the aborted connection is closed in the next turn of the loop
        while (code := self._process.poll()) is None and (until_s is None or time.monotonic() < until_s):
            await asyncio.sleep(EXIT_POLL_S)
        return code

    async def _receive(self, limit_s: float) -> Reply:
        if not self._replies and not self._has_ended:
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(limit_s):
                    await self._arrival
            except TimeoutError:
                await asyncio.sleep(READ_S)
                if not self._replies:
                    raise
        if not self._replies:
            raise await self._died()
        return self._replies.popleft()

    async def _died(self) -> WorkerDied:
        code = await self.close()
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        lines = " | ".join(self._stderr.last)
        return WorkerDied(f"the reward worker {how}" + (f"; its last lines: {lines}" if lines else ""))


class ForwardedLines(asyncio.Protocol):
    """Prints the output of the user's code with Python, so that a progress display is redrawn around it."""

    def __init__(self) -> None:
        self.last: deque[str] = deque(maxlen=STDERR_LINES)
        self.has_ended = False
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._print(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._print(self._rest)
        self._rest, self.has_ended = b"", True

    def _print(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self.last.append(line)
        print(printable(line), file=sys.stderr)  # it may quote answers

    async def finish(self, process: "subprocess.Popen[bytes]", limit_s: float) -> None:
        """Read what is left. A process that left the group may keep the pipe open."""
        until_s = time.monotonic() + limit_s
        try:
            while self._transport is not None and not self.has_ended and time.monotonic() < until_s:
                await asyncio.sleep(EXIT_POLL_S)
        finally:
            self.has_ended = True
            if self._transport is not None:
                self._transport.close()
            elif process.stderr is not None:
                process.stderr.close()
