"""The servers of a run: which of them is up, which process it is, and what becomes of one that fails.

A server is used if it is up and has the current weights. One that failed is restarted if rloom started it, and looked
for otherwise; either way it has to be sent the weights before it is used again, since its process may be a new one.
A server of the user's may be started again without a failure that rloom sees: `confirm` finds that.
All methods are called in the event loop.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from rloom.errors import WorkerError
from rloom.net.http import Refused, Unreachable
from rloom.net.loop import Signal
from rloom.rollout.servers.http import Http
from rloom.rollout.servers.queues import Prompt, RequestQueues, Server
from rloom.rollout.servers.wire import HEALTH, Call, IdentityRoute, ServerApiError

log = logging.getLogger(__name__)
KEY = "actor_rollout_ref.rollout.server"
FAILURES_IN_A_ROW = 3  # of health checks, after which a server counts as down
START_POLL_S = 0.2
IDENTITY_EVERY_S = 0.1  # at most: one reading is for all answers that came since the last
IDLE_S = 1.0  # after so long without a reading, one comes before the next request
IDENTITY_READS = 4  # at the start, over as many connections: a load balancer shows several processes


@dataclass(frozen=True)
class WatchSettings:
    start_timeout_s: float
    health_interval_s: float
    max_restarts: int


class WatchedServers:
    def __init__(
        self, servers: Sequence[Server], http: Http, settings: WatchSettings, *, resends: bool, max_requests: int
    ) -> None:
        self.servers, self.http, self.settings = servers, http, settings
        self.resends = resends  # weights can be sent again while requests wait
        self.version: int | None = None  # of the trainer's weights
        self.queues = RequestQueues(servers, max_requests, self.is_usable)
        self.changed = Signal()
        self.no_server_timer: asyncio.TimerHandle | None = None  # while no server can be used
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
                f"{KEY}.urls={server.url}: the server {server.reason}. Start it with the arguments of docs/rollout.md, "
                f"or correct the URL; {KEY}.start_timeout_s={self.settings.start_timeout_s:g} is how long rloom waits"
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
                await self.bring_up(server)
        except TimeoutError:
            server.reason = f"did not answer {HEALTH.path} in {limit_s:g} s"

    async def bring_up(self, server: Server) -> bool:
        """A server that is healthy, if it tells which process it is. It has no weights of the trainer's yet."""
        try:
            await self.identify(server)
        except (Unreachable, Refused, ServerApiError) as failure:
            server.reason = str(failure)
            return False
        server.is_up, server.failures = True, 0
        server.asleep.clear()
        self.notify()
        return True

    async def identify(self, server: Server) -> None:
        """Record the instance id before weights are sent, so that a restart is noticed."""
        route = self.http.wire.identity_route
        if route is not None:
            readings = await asyncio.gather(*(self.http.send(server.url, route.call) for _ in range(IDENTITY_READS)))
            instances = {route.parse(reading).instance for reading in readings}
            if len(instances) > 1:
                raise ServerApiError(
                    f"is {len(instances)} processes, as behind a load balancer: weights would reach one of them. Name "
                    f"each server by its own address in {KEY}.urls"
                )
            [server.instance] = instances

    async def confirm(self, server: Server, label: str) -> bool:
        """Whether the process that was sent these weights has answered until now.

        Read after this call began: an answer that came before it is then of that process, since it has been there from
        the update to the reading. Answers with a label of their own (SGLang) need no reading.
        """
        if self.http.wire.identity_route is not None:
            if server.next_reading is None:
                server.next_reading = asyncio.create_task(self.read_identity(server, self.http.wire.identity_route))
            await asyncio.shield(server.next_reading)  # others wait for it, too
        return server.label == label

    async def read_identity(self, server: Server, route: IdentityRoute) -> None:
        if server.reading is not None:
            await asyncio.wait([server.reading])
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, server.confirmed_s + IDENTITY_EVERY_S - loop.time()))
        server.reading, server.next_reading = server.next_reading, None
        label, fault = server.label, None
        if label is None:  # it failed meanwhile
            return
        try:
            found = route.parse(await self.send(server, route.call))
        except (Unreachable, Refused, ServerApiError) as failure:
            fault = str(failure)
        else:
            if found.instance != server.instance:
                fault = "was started again: another process answers, which does not have the trainer's weights"
            elif found.label != label:
                fault = f"has other weights than it was sent: {found.label or 'its own'} in place of {label}"
        server.confirmed_s = loop.time()
        if fault is not None and server.label == label:
            self.failed(server, fault)

    async def confirm_after_idle(self, server: Server, label: str) -> bool:
        """Before a request: the answers of a server that was started again would be discarded."""
        idle = asyncio.get_running_loop().time() - server.confirmed_s > IDLE_S
        return not idle or await self.confirm(server, label)

    async def refresh(self) -> None:
        """Before an update: servers of the user's that were started again are taken as the new ones that they are."""
        known = [(server, server.label) for server in self.servers if server.is_up and server.label is not None]
        await asyncio.gather(*(self.confirm(server, label) for server, label in known))
        lost = [server for server, _ in known if not server.is_up and server.process is None and not server.is_gone]
        await asyncio.gather(*(self.recover(server) for server in lost))

    async def watch(self, server: Server) -> None:
        while not server.is_gone:
            await self.changed.wait(self.settings.health_interval_s)  # ends early when a server fails
            code = None if server.process is None else server.process.exit_code
            if server.is_up and code is not None:
                self.failed(server, f"ended with exit code {code}")
            elif server.is_up and server.unfinished:  # SGLang generates for a health check: not while it sleeps
                await self.check(server)
            if not server.is_up and not server.is_gone:
                await self.recover(server)

    async def check(self, server: Server) -> None:
        try:
            healthy = await self.http.is_healthy(server.url)
        except WorkerError:  # this process cannot connect: that says nothing about the server
            return
        if healthy:
            server.failures = 0
            return
        server.failures += 1
        if server.failures >= FAILURES_IN_A_ROW:
            self.failed(server, f"failed {FAILURES_IN_A_ROW} health checks in a row")

    async def recover(self, server: Server) -> None:
        async with server.recovering:
            if server.is_up:
                return
            if server.process is None:
                with suppress(WorkerError):  # this process cannot connect
                    if await self.http.is_healthy(server.url) and await self.bring_up(server):
                        log.info(f"The server {server.url} answers again.")
                return
            if server.restarts == self.settings.max_restarts:
                server.is_gone = True
                server.reason += f", after {KEY}.max_restarts={server.restarts} restarts"
                self.notify()
                return
            server.restarts += 1
            log.warning(
                f"The server {server.url} is started again ({server.restarts} of {self.settings.max_restarts})."
            )
            await asyncio.to_thread(server.process.stop)
            server.process.start()
            await self.await_start(server)

    def failed(self, server: Server, reason: str) -> None:
        """It gets no requests; those that it had are sent to others by their own tasks."""
        if not server.is_up:
            return
        server.is_up, server.version, server.label, server.reason = False, None, None, reason
        server.failures_since_answer += 1
        if server.process is None and server.failures_since_answer > self.settings.max_restarts:
            server.is_gone = True
            server.reason += f", and failed {server.failures_since_answer} times without an answer ({KEY}.max_restarts)"
        if server.sender is not None:
            server.sender.close()
            server.sender = None
        now = asyncio.get_running_loop().time()
        for send in server.sends:  # a server that hangs would not answer them
            send.reschedule(now)
        server.sends.clear()
        self.queues.take_back(server)
        others = sum(self.is_usable(other) for other in self.servers)
        log.warning(f"The server {server.url} {server.reason}. {others} of {len(self.servers)} servers are left.")
        self.notify()

    def is_usable(self, server: Server) -> bool:
        return server.is_up and server.version is not None and server.version == self.version

    def stale(self) -> list[Server]:
        """Up, and without the current weights."""
        return [server for server in self.servers if server.is_up and not self.is_usable(server)]

    async def acquire(self, prompt: Prompt, conversation: int | None = None) -> Server:
        """A server that takes one more request now. Waits `start_timeout_s` at most while none can be used at all."""
        asyncio.get_running_loop().call_soon(self.check_usable_servers)
        return await self.queues.acquire(prompt, conversation)

    def check_usable_servers(self) -> None:
        if not self.queues.waiting or any(map(self.is_usable, self.servers)):
            if self.no_server_timer is not None:
                self.no_server_timer.cancel()
                self.no_server_timer = None
        elif self.unrecoverable() is not None:
            self.queues.refuse(self.none_left)
        elif self.no_server_timer is None:
            self.no_server_timer = asyncio.get_running_loop().call_later(self.settings.start_timeout_s, self.end_wait)

    def end_wait(self) -> None:
        self.no_server_timer = None
        self.queues.refuse(self.none_left)

    async def send(self, server: Server, call: Call) -> bytes:
        """Unreachable: also if the server counts as down before it has answered."""
        until_failed = asyncio.timeout(None)
        try:
            async with until_failed:
                server.sends.add(until_failed)
                return await self.http.send(server.url, call)
        except TimeoutError:
            raise Unreachable(server.reason) from None
        finally:
            server.sends.discard(until_failed)

    def unrecoverable(self) -> str | None:
        """Why no server will become usable while requests wait: the weights would have to be sent to one again."""
        if all(server.is_gone for server in self.servers):
            return "and none is started again"
        if not self.resends:
            return "that has the current weights, which the actor's workers send only after an update"
        return None

    def none_left(self) -> WorkerError:
        reasons = "; ".join(f"{server.url} {server.reason}" for server in self.servers)
        rest = self.unrecoverable() or f"for {KEY}.start_timeout_s={self.settings.start_timeout_s:g} s"
        lost = not self.resends and not all(server.is_gone for server in self.servers)
        return WorkerError(
            f"{KEY}: no server is left {rest}: {reasons}. The same command goes on from the last checkpoint", lost=lost
        )

    def notify(self) -> None:
        """Of a server that came up, got weights, or failed."""
        self.changed.notify()
        self.queues.assign()
        self.check_usable_servers()

    async def close(self) -> None:
        for watcher in self.watchers:
            watcher.cancel()
        await asyncio.gather(*self.watchers, return_exceptions=True)
        if self.no_server_timer is not None:
            self.no_server_timer.cancel()
        for server in self.servers:
            if server.sender is not None:
                server.sender.close()
