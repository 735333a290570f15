"""Environments in processes of their own, as the driver uses them: begin, act, end. All of it in one event loop."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rloom.episodes.agents.process import AgentSetup
from rloom.episodes.base import (
    ACT,
    BEGIN,
    CLOSE_S,
    COMMAND_BYTES,
    END,
    ERRORS,
    FORK,
    KILL,
    NO_PROCESS,
    NUMBER,
    EnvironmentReport,
    EnvironmentSetup,
    EpisodeLimits,
    Observation,
    ToolSchema,
)
from rloom.episodes.output import Output
from rloom.episodes.record import Ending
from rloom.episodes.replies import (
    LONGEST_NAME,
    LONGEST_REASON,
    LONGEST_REPLY,
    EnvironmentFailed,
    WrongReply,
    as_beginning,
    as_end,
    as_object,
    as_observation,
    read_reply,
)
from rloom.episodes.rows import CodeNames
from rloom.episodes.user_errors import LONGEST_TRACEBACK
from rloom.errors import ConfigError, TrainingError
from rloom.import_path import child_command
from rloom.net.http import allowed_connections
from rloom.rewards.framing import framed
from rloom.types import Message, plain_text

LOAD_LIMIT_S = 120.0
FORK_LIMIT_S, LATE_FORK_LIMIT_S = 20.0, 60.0  # of the first request, and of a second one
SEND_AGAIN_S, STUCK_S = 0.01, 60.0  # a command that the socket does not take; a server that reads none is killed
KILL_GRACE_S = 2.0  # after a call's limit, at which the process raises an error itself
MOST_RESTARTS = 10  # without an episode that ended in between
# of the driver: a connection to the process, and what an agent's SDK keeps open to the gateway
DESCRIPTORS_PER_ENVIRONMENT, DESCRIPTORS_PER_AGENT = 1, 4
UNREQUESTED = "its process sent a reply without a request: code in it has written to its connection"
_LENGTH = struct.Struct("!Q")
T = TypeVar("T")
log = logging.getLogger(__name__)


class EnvironmentProcess:
    """One forked process, which serves one episode."""

    def __init__(self, pid: int, connection: socket.socket, server: "EnvironmentServer") -> None:
        self.pid, self.connection, self.server = pid, connection, server
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.number = 0  # of the last request
        self.left_over = False  # it sent something after its last reply

    async def call(self, request: Sequence[Any], limit_s: float) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                await self.request(request)
                found = await self.receive()
        except TimeoutError:
            reason = f"no answer after {limit_s - KILL_GRACE_S:g} s; its process was killed"
            raise EnvironmentFailed(reason, Ending.NO_ANSWER) from None
        self.check_number(found)
        return found

    async def request(self, request: Sequence[Any]) -> None:
        """With a number that the reply to it repeats."""
        self.number = secrets.randbits(62)
        await self.send((self.number, *request))

    def check_number(self, found: Mapping[str, Any]) -> None:
        if found.get(NUMBER) != self.number:
            raise WrongReply(UNREQUESTED)

    async def send(self, message: Sequence[Any]) -> None:
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(sock=self.connection)
        self.writer.write(framed(pickle.dumps(tuple(message), protocol=pickle.HIGHEST_PROTOCOL)))

    async def receive(self) -> Mapping[str, Any]:
        assert self.reader is not None
        try:
            (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
            if length > LONGEST_REPLY:
                raise WrongReply(f"a reply of {length:,} bytes; at most {LONGEST_REPLY:,} are read")
            body = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            raise EnvironmentFailed("its process ended", Ending.EXITED) from None
        found = as_object(body)
        errors = found.get(ERRORS)
        if isinstance(errors, dict):
            for place, text in errors.items():
                self.server.output.show_error(place[:LONGEST_NAME], str(text)[:LONGEST_TRACEBACK])
        return found

    async def ends_within(self, limit_s: float) -> bool:
        """Whether it ends by itself, once the connection is closed on this side."""
        if self.reader is None or self.writer is None:
            self.connection.close()
            return True
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(OSError):
                    self.writer.write_eof()
                    while await self.reader.read(1 << 20):
                        self.left_over = True
                return True
        except TimeoutError:
            return False

    def kill(self) -> None:
        self.server.kill(self.pid)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self.connection.close()


class EnvironmentServer:
    """The process that the others are forked from, which has loaded the user's files.

    Once they are loaded, only the event loop writes to it. When it ends, the processes forked from it end, too.
    """

    def __init__(self, setup: EnvironmentSetup | AgentSetup, output: Output) -> None:
        self.setup, self.output = setup, output
        self.control, theirs = socket.socketpair()
        self.numbers = itertools.count()
        self.unsent = bytearray()  # commands
        self.sending: asyncio.AbstractEventLoop | None = None  # that sends them when the socket takes more
        self.sent_s = 0.0  # time of the last progress
        with theirs, output.written() as written:
            self.process = subprocess.Popen(
                child_command("rloom.episodes.server"),
                stdin=theirs.fileno(),
                stdout=written,
                stderr=written,
                env={"OMP_NUM_THREADS": "1", **without(os.environ, setup.withheld)},
                start_new_session=True,
            )

    def load(self) -> Mapping[str, Any]:
        """What it tells of the user's files; "failed": why they cannot be used; empty: it ended. Blocks."""
        try:
            self.control.settimeout(LOAD_LIMIT_S)
            self.control.sendall(framed(pickle.dumps(self.setup, protocol=pickle.HIGHEST_PROTOCOL)))
            with self.control.makefile("rb") as received:
                header = received.read(_LENGTH.size)
                found: dict[str, Any] = json.loads(received.read(_LENGTH.unpack(header)[0])) if header else {}
            self.control.setblocking(False)
        except TimeoutError:
            return {"failed": f"it was not loaded in {LOAD_LIMIT_S:g} s"}
        except OSError:
            return {}
        for place, text in found.pop(ERRORS, {}).items():
            self.output.show_error(place, text)
        return found

    async def fork(self, limit_s: float) -> EnvironmentProcess | None:
        """None: it has ended, or does not answer."""
        ours, theirs = open_pair()
        number = next(self.numbers).to_bytes(COMMAND_BYTES, "big")
        loop = asyncio.get_running_loop()
        pid = None
        try:
            async with asyncio.timeout(limit_s):
                with theirs:
                    while not self.sends_fork(number, theirs):
                        await asyncio.sleep(SEND_AGAIN_S)
                while answer := await loop.sock_recv(self.control, 2 * COMMAND_BYTES):
                    if answer.startswith(number):  # else of a request that was cancelled; its process ends by itself
                        pid = int.from_bytes(answer[COMMAND_BYTES:], "big")
                        break
        except TimeoutError:
            log.warning("the process that %s are forked from did not answer in %s s", self.setup.plural, f"{limit_s:g}")
        except OSError:
            pass  # it ended
        finally:
            if not pid:
                ours.close()
        if pid == NO_PROCESS:
            raise EnvironmentFailed(
                "no further process could be started: memory, or the number of processes (ulimit -u), is at its limit; "
                "lower actor_rollout_ref.rollout.multi_turn.max_environments",
                Ending.EXITED,
            )
        return None if pid is None else EnvironmentProcess(pid, ours, self)

    def sends_fork(self, number: bytes, connection: socket.socket) -> bool:
        """False: commands before it wait, or the socket takes no more."""
        if self.unsent:
            return False
        try:
            socket.send_fds(self.control, [FORK + number], [connection.fileno()])
        except BlockingIOError:
            return False
        return True

    def kill(self, pid: int) -> None:
        self.unsent += KILL + pid.to_bytes(COMMAND_BYTES, "big")
        if self.sending is None:
            self.send_commands()

    def send_commands(self) -> None:
        """Those that the socket does not take are kept: many episodes may end at once."""
        try:
            while self.unsent:
                del self.unsent[: self.control.send(self.unsent)]
                self.sent_s = time.monotonic()
        except BlockingIOError:
            if self.sending is None:
                self.sending, self.sent_s = asyncio.get_running_loop(), time.monotonic()
                self.sending.add_writer(self.control, self.send_commands)
                self.watch()
            return
        except OSError:
            self.unsent.clear()  # it has ended, and the processes with it
        self.stop_sending()

    def watch(self) -> None:
        """A server that reads no command for a long time is killed: processes that hang would never end."""
        if self.sending is not None:
            if (left_s := self.sent_s + STUCK_S - time.monotonic()) > 0:
                self.sending.call_later(left_s, self.watch)
            else:
                self.process.kill()

    def stop_sending(self) -> None:
        if self.sending is not None:
            self.sending.remove_writer(self.control)
            self.sending = None

    def disconnect(self) -> None:
        self.stop_sending()
        self.control.close()

    def stop(self) -> None:
        self.disconnect()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_S + KILL_GRACE_S)
        self.end()

    def end(self) -> None:
        """At once, with what the user's file has started in its process group: the server leads one of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def without(variables: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def open_pair() -> tuple[socket.socket, socket.socket]:
    try:
        return socket.socketpair()
    except OSError as error:
        raise EnvironmentFailed(
            f"no connection to its process could be opened ({error.strerror}); raise `ulimit -n`", Ending.EXITED
        ) from None


class EnvironmentPool:
    """At most `most` processes at a time, each for one episode."""

    def __init__(self, setup: EnvironmentSetup | AgentSetup, most: int) -> None:
        self.setup = setup
        self.places = asyncio.Semaphore(allowed_places(setup, most))
        self.forking = asyncio.Lock()
        self.restarting = threading.Lock()
        self.closed = False
        self.killed = 0  # processes that did not end by themselves
        self.late_forks = 0  # that a server answered when it was asked again
        self.restarts = 0  # of the server
        self.restarts_in_a_row = 0  # since an episode ended
        self.output = Output(setup.noun)
        self.tools: tuple[ToolSchema, ...] = ()  # once the user's file is loaded
        self.names = CodeNames()  # likewise
        self.server = self.newest_server = EnvironmentServer(setup, self.output)

    def load(self) -> tuple[ToolSchema, ...]:
        """Wait until the user's file is loaded, and return the tools. Blocks."""
        found = self.loaded()
        self.tools, self.names = tuple(found["tools"]), CodeNames(**found["names"])
        return self.tools

    def loaded(self) -> Mapping[str, Any]:
        """What the server tells of the user's file. ConfigError: it cannot be used."""
        found = self.server.load()
        reason = found.get("failed", None if found else "the process that loads it ended; see its output")
        if reason is not None:
            self.close()
            key = self.setup.key
            raise ConfigError(reason if reason.startswith("actor_rollout_ref.") else f"{key}: {reason}")
        return found

    async def process(self) -> EnvironmentProcess:
        """A new one. If the server has ended or does not answer, it is replaced: a user's code may have stopped it."""
        async with self.forking:
            while True:
                server = self.server
                if (found := await server.fork(FORK_LIMIT_S)) is not None:
                    return found
                # its end is the end of all running episodes: a machine that swaps may have been slow
                if (found := await server.fork(LATE_FORK_LIMIT_S)) is not None:
                    self.late_forks += 1
                    return found
                self.restarts += 1
                self.restarts_in_a_row += 1
                if self.restarts_in_a_row > MOST_RESTARTS:
                    raise TrainingError(
                        f"{self.setup.key}: the process that {self.setup.plural} are forked from ended "
                        f"{MOST_RESTARTS} times, and no episode ended in between; see its output. If memory is short, "
                        "lower actor_rollout_ref.rollout.multi_turn.max_environments"
                    )
                try:
                    await asyncio.to_thread(self.restart, server)
                finally:
                    server.disconnect()

    def restart(self, ended: EnvironmentServer) -> None:
        """In a thread, which goes on if the episode that waits for it is cancelled."""
        with self.restarting:
            if self.server is not ended or self.closed:
                return
            ended.end()
            self.newest_server = EnvironmentServer(self.setup, self.output)
            if "failed" in (found := self.newest_server.load()):
                raise TrainingError(f"{self.setup.key}: it was to be loaded again, and {found['failed']}")
            self.server = self.newest_server  # it can fork now

    @contextlib.asynccontextmanager
    async def episode(self) -> "AsyncIterator[RunningEnvironment]":
        """An environment that is to begin. At the end its process closes it and ends; one that hangs is killed."""
        async with self.places:
            process = await self.process()
            assert isinstance(self.setup, EnvironmentSetup)
            limits, calls = self.setup.limits, 2 + len(self.tools)
            episode = RunningEnvironment(process, limits, calls)
            try:
                yield episode
            finally:
                close_s = calls * limits.call_s + KILL_GRACE_S if episode.ended else 0 if episode.busy else CLOSE_S
                ended = False
                try:
                    ended = close_s > 0 and await process.ends_within(close_s)
                finally:
                    if not ended:
                        self.kill(process)
                    process.close()
            if process.left_over:
                raise WrongReply(UNREQUESTED)
            self.restarts_in_a_row = 0

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[EnvironmentProcess]:
        """A process for an agent, which is killed at the end of its episode, with all that it has started."""
        async with self.places:
            process = await self.process()
            try:
                yield process
            finally:
                self.kill(process)
                process.close()
            self.restarts_in_a_row = 0

    def kill(self, process: EnvironmentProcess) -> None:
        self.killed += 1
        process.kill()

    def close(self) -> None:
        self.closed = True
        while not self.restarting.acquire(timeout=0.1):
            self.newest_server.process.kill()  # the end of loading is not waited for
        self.newest_server.stop()
        self.restarting.release()
        self.output.close()


def allowed_places(setup: EnvironmentSetup | AgentSetup, most: int) -> int:
    """As many as this process can have connections for."""
    each = DESCRIPTORS_PER_AGENT if isinstance(setup, AgentSetup) else DESCRIPTORS_PER_ENVIRONMENT
    found = max(1, min(most, allowed_connections(each * most) // each))
    if found < most:
        log.warning(
            "At most %s %s run at a time in place of %s (max_environments): `ulimit -n` allows no more connections. "
            "Raise its hard limit",
            found,
            setup.plural,
            most,
        )
    return found


class RunningEnvironment:
    """The environment of one episode."""

    def __init__(self, process: EnvironmentProcess, limits: EpisodeLimits, calls: int) -> None:
        """`calls`: of a user's code, at the beginning and at the end: of the environment itself, and of each tool."""
        self.process, self.limits, self.calls = process, limits, calls
        self.busy = False  # a call has no reply yet
        self.ended = False
        self.tools: tuple[ToolSchema, ...] | None = None  # None: those of all episodes
        self.report = EnvironmentReport()  # after the end
        self.reward_of_steps: float | None = None  # see Environment

    async def begin(self, row: Mapping[str, Any], messages: Sequence[Message], seed: int) -> tuple[Message, ...]:
        """`seed`: of what it draws."""
        beginning = await self.call(as_beginning, self.calls, BEGIN, dict(row), tuple(messages), seed)
        found, self.tools, self.reward_of_steps = beginning
        return found

    async def act(self, text: str, marked: str | None = None) -> Observation:
        """`marked`: the text with special tokens, in which some models write calls; None: they change nothing."""
        return await self.call(as_observation, self.limits.parallel_calls, ACT, text, marked)

    async def end(self) -> float | None:
        """The reward at the end. A call that was given up still runs: no other can be made, and the process is
        killed."""
        if self.busy:
            return self.reward_of_steps
        reward, self.report = await self.call(as_end, self.calls, END)
        self.ended = True
        return reward

    async def call(self, read: Callable[[Any], T], calls: int, *request: Any) -> T:
        """`calls`: of a user's code, each within its limit."""
        self.busy = True
        try:
            found = await self.process.call(request, calls * self.limits.call_s + KILL_GRACE_S)
        except WrongReply:
            self.busy = False
            raise
        self.busy = False
        if "failed" in found:
            ending = Ending.FAILED if found.get("in_time") else Ending.NO_ANSWER
            raise EnvironmentFailed(plain_text(str(found["failed"])[:LONGEST_REASON]), ending)
        return read_reply(read, found)
