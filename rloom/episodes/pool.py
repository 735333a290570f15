"""Environments in processes of their own, as the driver uses them: begin, act, end. All of it in one event loop.

What a process replies is checked here: generated code may have written it.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from rloom.episodes.agents.process import AgentSetup
from rloom.episodes.base import (
    ACT,
    BEGIN,
    CLOSE_S,
    END,
    FORK,
    KILL,
    EnvironmentReport,
    EnvironmentSetup,
    EpisodeLimits,
    Observation,
    ToolSchema,
)
from rloom.episodes.record import Ending
from rloom.episodes.rows import CodeNames
from rloom.errors import RewardError
from rloom.import_path import child_command
from rloom.rewards.framing import framed
from rloom.types import Message, ToolCall, plain_text

LOAD_LIMIT_S = 120.0
KILL_GRACE_S = 2.0  # after a call's limit, at which the process raises an error itself
LONGEST_REPLY = 64 << 20
OUTPUT_BYTES = 1 << 20  # that all environments of a run may print
_LENGTH = struct.Struct("!Q")
log = logging.getLogger(__name__)


class EnvironmentFailed(Exception):
    """The environment raised an error, did not answer in time, or its process ended. The episode has no reward."""

    def __init__(self, reason: str, ending: Ending = Ending.FAILED) -> None:
        super().__init__(reason)
        self.ending = ending


class WrongReply(EnvironmentFailed):
    """A reply of another form than `base.py` describes."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Ending.WRONG_REPLY)


class EnvironmentProcess:
    """One forked process, which serves one episode."""

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
            reason = f"no answer after {limit_s - KILL_GRACE_S:g} s; its process was killed"
            raise EnvironmentFailed(reason, Ending.NO_ANSWER) from None

    async def send(self, request: Sequence[Any]) -> None:
        if self.reader is None or self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(sock=self.connection)
        self.writer.write(framed(pickle.dumps(tuple(request), protocol=pickle.HIGHEST_PROTOCOL)))

    async def receive(self) -> Mapping[str, Any]:
        assert self.reader is not None
        try:
            (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
            if length > LONGEST_REPLY:
                raise WrongReply(f"a reply of {length:,} bytes; at most {LONGEST_REPLY:,} are read")
            found = json.loads(await self.reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            raise EnvironmentFailed("its process ended", Ending.EXITED) from None
        except (ValueError, RecursionError):
            raise WrongReply("its reply is not JSON") from None
        if not isinstance(found, dict):
            raise WrongReply(f"its reply is {type(found).__name__}, not a JSON object")
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
                        pass
                return True
        except TimeoutError:
            return False

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
        else:
            self.connection.close()


class EnvironmentPool:
    """At most `most` processes at a time, each for one episode."""

    def __init__(self, setup: EnvironmentSetup | AgentSetup, most: int) -> None:
        self.setup = setup
        self.places = asyncio.Semaphore(most)
        self.forking = asyncio.Lock()
        self.killed = 0  # processes that did not end by themselves
        self.restarts = 0  # of the process that they are forked from
        self.output = Output()
        self.tools: tuple[ToolSchema, ...] = ()  # once the user's file is loaded
        self.names = CodeNames()  # likewise
        self.start()

    def start(self) -> None:
        self.control, theirs = socket.socketpair()
        with theirs, self.output.written() as output:
            self.server = subprocess.Popen(
                child_command("rloom.episodes.server"),
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
            )

    def load(self) -> tuple[ToolSchema, ...]:
        """Wait until the user's file is loaded, and return the tools. Blocks."""
        found = self.loaded()
        self.tools, self.names = tuple(found["tools"]), CodeNames(**found["names"])
        return self.tools

    def loaded(self) -> Mapping[str, Any]:
        """What the process tells of the user's file."""
        found: Mapping[str, Any] = {"failed": "the process that loads the environment ended; see its output"}
        try:
            self.control.settimeout(LOAD_LIMIT_S)
            self.control.sendall(framed(pickle.dumps(self.setup, protocol=pickle.HIGHEST_PROTOCOL)))
            with self.control.makefile("rb") as received:
                if header := received.read(_LENGTH.size):
                    found = json.loads(received.read(_LENGTH.unpack(header)[0]))
            self.control.settimeout(None)
        except TimeoutError:
            found = {"failed": f"{self.setup.reference} was not loaded in {LOAD_LIMIT_S:g} s"}
        except OSError:
            pass  # it ended
        if "failed" in found:
            self.close()
            raise RewardError(found["failed"])
        return found

    async def process(self) -> EnvironmentProcess:
        async with self.forking:
            found = await self.forked()
            if found is None:  # a user's code has ended the process that it was forked from
                self.restarts += 1
                await asyncio.to_thread(self.restart)
                found = await self.forked()
        if found is None:
            raise EnvironmentFailed("the process that the environments are forked from ended", Ending.EXITED)
        return found

    async def forked(self) -> EnvironmentProcess | None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self.control, [FORK], [theirs.fileno()])
            pid = await asyncio.to_thread(self.control.recv, 4)
        except OSError:
            pid = b""
        except asyncio.CancelledError:
            ours.close()  # the process finds that, and ends
            raise
        if len(pid) < 4:
            ours.close()
            return None
        return EnvironmentProcess(int.from_bytes(pid, "big"), ours)

    def restart(self) -> None:
        self.stop()
        self.start()
        self.loaded()

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
                if not (close_s and await process.ends_within(close_s)):
                    self.kill(process.pid)
                process.close()

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[EnvironmentProcess]:
        """A process for an agent, which is killed at the end of its episode, with all that it has started."""
        async with self.places:
            process = await self.process()
            try:
                yield process
            finally:
                self.kill(process.pid)
                process.close()

    def kill(self, pid: int) -> None:
        self.killed += 1
        with contextlib.suppress(OSError):  # the process that it was forked from has ended, and it with that
            self.control.sendall(KILL + pid.to_bytes(4, "big"))

    def close(self) -> None:
        self.stop()
        self.output.close()

    def stop(self) -> None:
        self.control.close()
        try:
            self.server.wait(CLOSE_S + KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()


class Output:
    """What environments print, as a part of the run's output: the first MiB. The rest is counted."""

    def __init__(self) -> None:
        self.shown = self.dropped = 0
        self.readers: list[threading.Thread] = []

    @contextlib.contextmanager
    def written(self) -> Iterator[int]:
        """The descriptor to write to."""
        reading, writing = os.pipe()
        thread = threading.Thread(target=self.read, args=(reading,), name="environment-output", daemon=True)
        thread.start()
        self.readers.append(thread)
        try:
            yield writing
        finally:
            os.close(writing)

    def read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            while data := file.read(1 << 20):
                shown = data[: max(OUTPUT_BYTES - self.shown, 0)]
                if shown:
                    self.shown += len(shown)
                    with contextlib.suppress(OSError, ValueError):  # a closed output must not stop an environment
                        sys.stderr.write(shown.decode(errors="replace"))
                if len(shown) < len(data) and not self.dropped:
                    log.warning("environments have printed %s bytes; more is counted, not shown", f"{OUTPUT_BYTES:,}")
                self.dropped += len(data) - len(shown)

    def close(self) -> None:
        for thread in self.readers:
            thread.join(KILL_GRACE_S)
        if self.dropped:
            log.warning("%s bytes that environments have printed are not shown", f"{self.dropped:,}")


class RunningEnvironment:
    """The environment of one episode."""

    def __init__(self, process: EnvironmentProcess, limits: EpisodeLimits, calls: int) -> None:
        """`calls`: of a user's code, at the beginning and at the end: of the environment itself, and of each tool."""
        self.process, self.limits, self.calls = process, limits, calls
        self.busy = False  # a call has no reply yet
        self.ended = False
        self.tools: tuple[ToolSchema, ...] | None = None  # None: those of all episodes
        self.report = EnvironmentReport()  # after the end

    async def begin(self, row: Mapping[str, Any], messages: Sequence[Message], seed: int) -> tuple[Message, ...]:
        """`seed`: of what it draws."""
        found = await self.call(self.calls, BEGIN, dict(row), tuple(messages), seed)
        if (tools := found.get("tools")) is not None:
            if not isinstance(tools, list):
                raise WrongReply(f"its tools are {shown(tools)}, not a list")
            self.tools = tuple(tools)
        return as_messages(found.get("messages"))

    async def act(self, text: str, marked: str | None = None) -> Observation:
        """`marked`: the text with special tokens, in which some models write calls; None: they change nothing."""
        found = await self.call(self.limits.parallel_calls, ACT, text, marked)
        if not isinstance(found.get("done"), bool):
            raise WrongReply(f"its reply has done={shown(found.get('done'))}; true or false are possible")
        calls = found.get("calls")
        return Observation(
            as_messages(found.get("messages")), as_reward(found.get("reward")), found["done"], as_calls(calls)
        )

    async def end(self) -> float | None:
        """The reward at the end. After a call that was given up there is none, and the process is killed."""
        if self.busy:
            return None
        found = await self.call(self.calls, END)
        self.ended = True
        self.report = as_report(found)
        return as_reward(found.get("reward"))

    async def call(self, calls: int, *request: Any) -> Mapping[str, Any]:
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
            raise EnvironmentFailed(plain_text(str(found["failed"])), ending)
        return found


def as_report(found: Mapping[str, Any]) -> EnvironmentReport:
    facts, state, metrics = found.get("facts"), found.get("state"), found.get("metrics")
    if not all(isinstance(one, dict) for one in (facts, state, metrics)):
        raise WrongReply(f"its report is {shown([facts, state, metrics])}, not three mappings")
    assert isinstance(facts, dict) and isinstance(state, dict) and isinstance(metrics, dict)
    return EnvironmentReport(
        facts, state, {str(name): float(value) for name, value in metrics.items() if is_number(value)}
    )


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def as_messages(found: Any) -> tuple[Message, ...]:
    if not isinstance(found, list):
        raise WrongReply(f"its messages are {shown(found)}, not a list")
    for message in found:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise WrongReply(f"a message of it is {shown(message)}; a role and a content, both text, are needed")
    return tuple({**message, "content": plain_text(message["content"])} for message in found)


def as_reward(found: Any) -> float | None:
    if found is None:
        return None
    if not is_number(found):
        raise WrongReply(f"its reward is {shown(found)}, not a finite number")
    return float(found)


def as_calls(found: Any) -> tuple[ToolCall, ...]:
    try:
        calls = tuple(ToolCall(**one) for one in found)
        fits = all(
            isinstance(call.seconds, int | float)
            and all(isinstance(text, str) for text in (call.name, call.arguments, call.result, call.error or ""))
            for call in calls
        )
    except TypeError:
        fits = False
    if not fits:
        raise WrongReply(f"its calls of tools are {shown(found)}")
    return calls


def shown(value: Any) -> str:
    return plain_text(repr(value)[:100])
