"""Environments in processes of their own, as the driver uses them: begin, act, end. All of it in one event loop."""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rloom.episodes.agents.process import AgentSetup
from rloom.episodes.base import ACT, BEGIN, END, Limits, Observation, Report, Setup, ToolSchema
from rloom.errors import RewardError
from rloom.import_path import child_command
from rloom.rewards.framing import framed
from rloom.types import Message

LOAD_LIMIT_S = 120.0
KILL_GRACE_S = 2.0  # after a call's limit, at which the process raises an error itself
LONGEST_REPLY = 64 << 20
_LENGTH = struct.Struct("!Q")


class EnvironmentFailed(Exception):
    """The environment raised an error, did not answer in time, or its process ended. The episode has no reward."""


class EnvironmentProcess:
    """One forked process, which serves one episode after the other."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def call(self, request: Sequence[Any], limit_s: float) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(limit_s):
                await self.send(request)
                return await self.receive()
        except TimeoutError:
            raise EnvironmentFailed(f"no answer after {limit_s - KILL_GRACE_S:g} s; its process was killed") from None

    async def send(self, request: Sequence[Any]) -> None:
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(sock=self.connection)
        self.writer.write(framed(pickle.dumps(tuple(request), protocol=pickle.HIGHEST_PROTOCOL)))

    async def receive(self) -> Mapping[str, Any]:
        assert self.reader is not None
        try:
            (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
            if length > LONGEST_REPLY:
                raise EnvironmentFailed(f"a reply of {length:,} bytes; at most {LONGEST_REPLY:,} are read")
            found: Mapping[str, Any] = json.loads(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            raise EnvironmentFailed("its process ended") from None
        if "failed" in found:
            raise EnvironmentFailed(found["failed"])
        return found

    def kill(self) -> None:
        for signal_group in (os.killpg, os.kill):  # before it is the leader of a group, the first one fails
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal_group(self.pid, signal.SIGKILL)
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self.connection.close()


class EnvironmentPool:
    """At most `most` processes at a time. A process that failed is killed, others are used again."""

    def __init__(self, setup: Setup | AgentSetup, most: int) -> None:
        self.setup = setup
        self.control, theirs = socket.socketpair()
        with theirs:
            self.server = subprocess.Popen(
                child_command("rloom.episodes.server"),
                stdin=theirs.fileno(),
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )
        self.free: list[EnvironmentProcess] = []
        self.places = asyncio.Semaphore(most)
        self.forking = asyncio.Lock()
        self.killed = 0

    def load(self) -> tuple[ToolSchema, ...]:
        """Wait until the user's file is loaded, and return the tools. Blocks."""
        return tuple(self.loaded()["tools"])

    def loaded(self) -> Mapping[str, Any]:
        """What the process tells of the user's file."""
        self.control.settimeout(LOAD_LIMIT_S)
        self.control.sendall(framed(pickle.dumps(self.setup, protocol=pickle.HIGHEST_PROTOCOL)))
        with self.control.makefile("rb") as received:
            header = received.read(_LENGTH.size)
            found = json.loads(received.read(_LENGTH.unpack(header)[0])) if header else {"failed": "its process ended"}
        if "failed" in found:
            self.close()
            raise RewardError(found["failed"])
        loaded: Mapping[str, Any] = found
        return loaded

    async def process(self) -> EnvironmentProcess:
        if self.free:
            return self.free.pop()
        async with self.forking:
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.control, [b"f"], [theirs.fileno()])
            pid = await asyncio.to_thread(self.control.recv, 4)
            return EnvironmentProcess(int.from_bytes(pid, "big"), ours)

    @contextlib.asynccontextmanager
    async def episode(self) -> "AsyncIterator[RunningEnvironment]":
        """An environment that is to begin. Its process is used again if the episode was ended, else killed."""
        async with self.places:
            process = await self.process()
            assert isinstance(self.setup, Setup)
            episode = RunningEnvironment(process, self.setup.limits)
            try:
                yield episode
            finally:
                if episode.ended:
                    self.free.append(process)
                else:
                    self.killed += 1
                    process.kill()

    @contextlib.asynccontextmanager
    async def forked(self) -> AsyncIterator[EnvironmentProcess]:
        """A process for one episode, which is killed at its end, with all that it has started."""
        async with self.places:
            process = await self.process()
            try:
                yield process
            finally:
                process.kill()

    async def end(self) -> None:
        """End all processes. In the event loop that used them."""
        for process in self.free:
            process.kill()
        self.free.clear()

    def close(self) -> None:
        self.control.close()
        try:
            self.server.wait(KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()


class RunningEnvironment:
    """The environment of one episode."""

    def __init__(self, process: EnvironmentProcess, limits: Limits) -> None:
        self.process, self.limits = process, limits
        self.busy = False  # a call has no reply yet
        self.ended = False
        self.tools: tuple[ToolSchema, ...] | None = None  # None: those of all episodes
        self.report = Report()  # after the end

    async def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        found = await self.call(2, BEGIN, dict(row), tuple(messages))  # the environment is made, then it begins
        self.tools = None if found["tools"] is None else tuple(found["tools"])
        return tuple(found["messages"])

    async def act(self, text: str, marked: str | None = None) -> Observation:
        return Observation.from_json(await self.call(self.limits.parallel_calls, ACT, text, marked))

    async def end(self) -> float | None:
        """The reward at the end. After a call that was given up there is none, and the process is killed."""
        if self.busy:
            return None
        found = await self.call(3, END)  # reward, report, and the environment is closed
        self.ended = True
        self.report = Report(found["facts"], found["state"], found["metrics"])
        return None if found["reward"] is None else float(found["reward"])

    async def call(self, calls: int, *request: Any) -> Mapping[str, Any]:
        """`calls`: of a user's code, each within its limit."""
        self.busy = True
        found = await self.process.call(request, calls * self.limits.call_s + KILL_GRACE_S)
        self.busy = False
        return found
