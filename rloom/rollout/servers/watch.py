"""The servers of a run: which of them gets a request, and what becomes of one that fails.

A server is used if it is up and has the current weights. One that failed is restarted if rloom started it, and looked
for otherwise; either way it has to be sent the weights before it is used again, since its process may be a new one.
All methods are called in the event loop.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from rloom.errors import WorkerError
from rloom.rollout.servers.http import Http, Unreachable
from rloom.rollout.servers.launch import ServerProcess
from rloom.rollout.servers.wire import HEALTH, Call, Sender

log = logging.getLogger(__name__)
KEY = "actor_rollout_ref.rollout.server"
FAILURES_IN_A_ROW = 3  # of health checks, after which a server counts as down
START_POLL_S = 0.2
Prompt = tuple[int, ...]


@dataclass(eq=False)
class Server:
    url: str
    process: ServerProcess | None = None  # None: a server of the user's
    is_up: bool = False
    is_gone: bool = False  # not started again
    version: int | None = None  # of its weights; None: not those of the trainer
    asleep: set[str] = field(default_factory=set)  # parts of its memory that are released
    unfinished: int = 0
    failures: int = 0  # of health checks in a row
    restarts: int = 0
    reason: str = "has not answered yet"
    sender: Sender | None = None
    sends: "set[asyncio.Task[bytes]]" = field(default_factory=set)  # requests without an answer yet


@dataclass(frozen=True)
class WatchSettings:
    start_timeout_s: float
    health_interval_s: float
    max_restarts: int


class WatchedServers:
    def __init__(self, servers: Sequence[Server], http: Http, settings: WatchSettings, *, resends: bool) -> None:
        self.servers, self.http, self.settings = servers, http, settings
        self.resends = resends  # weights can be sent again while requests wait
        self.version: int | None = None  # of the trainer's weights
        self.server_of: dict[Prompt, Server] = {}
        self.unfinished: Counter[Prompt] = Counter()
        self.changed = asyncio.Event()
        self.watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Every server has to answer before the run begins."""
        for server in self.servers:
            if server.process is not None:
                server.process.start()
        await asyncio.gather(*(self.await_start(server) for server in self.servers))
        missing = [server for server in self.servers if not server.is_up]
        if missing:
            raise WorkerError(self.cannot_start(missing[0]))
        self.watchers = [asyncio.create_task(self.watch(server)) for server in self.servers]

    def cannot_start(self, server: Server) -> str:
        if server.process is None:
            return (
                f"{KEY}.urls={server.url}: the server {server.reason}. Start it, or correct the URL; "
                f"{KEY}.start_timeout_s={self.settings.start_timeout_s:g} is how long rloom waits"
            )
        return (
            f"the server {server.url} {server.reason}. {KEY}.start_timeout_s={self.settings.start_timeout_s:g} is how "
            f"long rloom waits. The end of its log, {server.process.launch.log_file}:\n{server.process.log_tail()}"
        )

    async def await_start(self, server: Server) -> None:
        limit_s = self.settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not await self.http.is_healthy(server.url):
                    code = None if server.process is None else server.process.exit_code
                    if code is not None:
                        server.reason = f"ended with exit code {code}"
                        return
                    await asyncio.sleep(START_POLL_S)
        except TimeoutError:
            server.reason = f"did not answer {HEALTH.path} in {limit_s:g} s"
            return
        server.is_up, server.version, server.failures = True, None, 0
        server.asleep.clear()
        self.notify()

    async def watch(self, server: Server) -> None:
        while not server.is_gone:
            await self.pause(self.settings.health_interval_s)
            code = None if server.process is None else server.process.exit_code
            if server.is_up and code is not None:
                self.failed(server, f"ended with exit code {code}")
            elif server.is_up and server.unfinished:  # SGLang generates for a health check: not while it sleeps
                await self.check(server)
            if not server.is_up:
                await self.recover(server)

    async def pause(self, seconds: float) -> None:
        """Ends early when a server fails."""
        changed = self.changed
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await changed.wait()

    async def check(self, server: Server) -> None:
        if await self.http.is_healthy(server.url):
            server.failures = 0
            return
        server.failures += 1
        if server.failures >= FAILURES_IN_A_ROW:
            self.failed(server, f"failed {FAILURES_IN_A_ROW} health checks in a row")

    async def recover(self, server: Server) -> None:
        if server.process is None:
            if await self.http.is_healthy(server.url):
                server.is_up, server.failures = True, 0
                server.asleep.clear()
                log.info(f"The server {server.url} answers again.")
                self.notify()
            return
        if server.restarts == self.settings.max_restarts:
            server.is_gone = True
            server.reason += f", after {KEY}.max_restarts={server.restarts} restarts"
            self.notify()
            return
        server.restarts += 1
        log.warning(f"The server {server.url} is started again ({server.restarts} of {self.settings.max_restarts}).")
        await asyncio.to_thread(server.process.stop)
        server.process.start()
        await self.await_start(server)

    def failed(self, server: Server, reason: str) -> None:
        """It gets no requests; those that it had are sent to others by their own tasks."""
        if not server.is_up:
            return
        server.is_up, server.version, server.reason = False, None, reason
        if server.sender is not None:
            server.sender.close()
            server.sender = None
        for send in list(server.sends):  # a server that hangs would not answer them
            send.cancel()
        others = sum(self.is_usable(other) for other in self.servers)
        log.warning(f"The server {server.url} {reason}. {others} of {len(self.servers)} servers are left.")
        self.notify()

    def is_usable(self, server: Server) -> bool:
        return server.is_up and server.version is not None and server.version == self.version

    def stale(self) -> list[Server]:
        """Up, and without the current weights."""
        return [server for server in self.servers if server.is_up and not self.is_usable(server)]

    async def acquire(self, prompt: Prompt) -> Server:
        """The server of the prompt's other answers, whose keys it has; otherwise the one with the fewest requests."""
        server = await self.usable(prompt)
        self.server_of[prompt] = server
        self.unfinished[prompt] += 1
        server.unfinished += 1
        return server

    def release(self, server: Server, prompt: Prompt) -> None:
        server.unfinished -= 1
        self.unfinished[prompt] -= 1
        if not self.unfinished[prompt]:
            del self.unfinished[prompt], self.server_of[prompt]

    async def send(self, server: Server, call: Call) -> bytes:
        """Unreachable: also if the server counts as down before it has answered."""
        send = asyncio.ensure_future(self.http.send(server.url, call))
        server.sends.add(send)
        try:
            return await send
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():  # by the caller
                raise
            raise Unreachable(server.reason) from None
        finally:
            server.sends.discard(send)

    async def usable(self, prompt: Prompt) -> Server:
        try:
            async with asyncio.timeout(self.settings.start_timeout_s):
                while True:
                    known = self.server_of.get(prompt)
                    if known is not None and self.is_usable(known):
                        return known
                    usable = [server for server in self.servers if self.is_usable(server)]
                    if usable:
                        return min(usable, key=lambda server: server.unfinished)
                    self.check_recoverable()
                    await self.changed.wait()
        except TimeoutError:
            limit_s = self.settings.start_timeout_s
            raise WorkerError(self.none_left(f"for {KEY}.start_timeout_s={limit_s:g} s")) from None

    def check_recoverable(self) -> None:
        """While requests wait, a server becomes usable only if the weights can be sent to it again."""
        if all(server.is_gone for server in self.servers):
            raise WorkerError(self.none_left("and none is started again"))
        if not self.resends:
            raise WorkerError(
                self.none_left("that has the current weights, which the actor's workers send only after an update"),
                lost=True,
            )

    def none_left(self, rest: str) -> str:
        reasons = "; ".join(f"{server.url} {server.reason}" for server in self.servers)
        return f"{KEY}: no server is left {rest}: {reasons}. The same command goes on from the last checkpoint"

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def close(self) -> None:
        for watcher in self.watchers:
            watcher.cancel()
        await asyncio.gather(*self.watchers, return_exceptions=True)
        for server in self.servers:
            if server.sender is not None:
                server.sender.close()
