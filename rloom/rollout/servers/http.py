"""HTTP requests to servers, in an event loop of a thread of its own."""

import asyncio
import errno
import os
import resource
import sys
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpcore

from rloom.errors import WorkerError
from rloom.rollout.servers.launch import HOST
from rloom.rollout.servers.wire import HEALTH, Call, Wire

T = TypeVar("T")
HEALTH_TIMEOUT_S = 30.0  # SGLang generates a token for it, and waits up to 20 s
KEEP_ALIVE_S = 2.0  # servers close an idle connection after 5 s: a request could be on its way
SPARE_DESCRIPTORS = 256  # for what else the process opens: files, shared memory, process groups
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError)


class Unreachable(Exception):
    """No answer: no connection, one that was closed, or none in time. The message completes "the server ..."."""


class Refused(Exception):
    """An HTTP status that is no success. The message completes "the server ..."."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"answered with HTTP status {status}: {text[:500].strip() or 'an empty body'}")
        self.is_fault_of_the_request = 400 <= status < 500 and status not in (408, 429)


class EventLoop:
    """Runs coroutines for a thread that has no event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rloom servers", daemon=True)
        self.thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result()

    def cancel_all(self) -> None:
        """Every coroutine that still runs, and wait for their ends."""
        self.run(cancel_others())

    def close(self) -> None:
        self.run(asyncio.sleep(0))  # a closed connection releases its socket in the next turn of the loop
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


async def cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Http:
    """Kept-alive connections to servers. A request takes an idle one or opens another; callers bound their number.

    Not httpx: its pool looks at all connections and all waiting requests at each event, which is quadratic in requests.
    Proxies of the environment do not apply: servers are on the user's own machines.
    """

    def __init__(self, wire: Wire, key: str | None, timeout_s: float) -> None:
        self.wire, self.key, self.timeout_s = wire, key, timeout_s
        self.idle: defaultdict[str, list[httpcore.AsyncHTTPConnection]] = defaultdict(list)  # by the server's URL

    async def send(self, url: str, call: Call, timeout_s: float | None = None) -> bytes:
        limit_s = timeout_s or self.timeout_s
        try:
            response = await within(limit_s, self.exchange(url, call))
        except TimeoutError:
            raise Unreachable(f"did not answer {call.path} in {limit_s:g} s") from None
        except FAILURES as error:
            if lacks_descriptors(error):
                raise WorkerError(no_descriptors(url)) from error
            raise Unreachable(f"gave no answer to {call.path} ({type(error).__name__}: {error})") from error
        if not 200 <= response.status < 300:
            raise Refused(response.status, response.content.decode(errors="replace"))
        return response.content

    async def exchange(self, url: str, call: Call) -> httpcore.Response:
        """An exchange that fails or is cancelled closes its connection, at which servers abort the request."""
        target, body = httpcore.URL(url.rstrip("/") + call.path), call.body
        headers = {"Content-Type": "application/json", **self.wire.headers(self.key, body)}
        connection = await self.connection_to(url, target.origin)
        method = "GET" if call.is_get else "POST"
        try:
            response = await connection.request(method, target, headers=list(headers.items()), content=body)
        except BaseException:
            # httpcore does not close the connection at every point where a request can be cancelled
            await connection.aclose()
            raise
        if connection.is_idle():
            self.idle[url].append(connection)
        return response

    async def connection_to(self, url: str, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        idle = self.idle[url]
        while idle:
            connection = idle.pop()  # the one that was used last
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(origin, keepalive_expiry=KEEP_ALIVE_S)

    async def is_healthy(self, url: str) -> bool:
        try:
            await self.send(url, HEALTH, HEALTH_TIMEOUT_S)
        except (Unreachable, Refused):
            return False
        return True

    async def close(self) -> None:
        for connection in [one for idle in self.idle.values() for one in idle]:
            await connection.aclose()


class ProcessConnection(asyncio.Protocol):
    """An idle connection that the kernel closes when the server's process ends, before another one can answer.

    Servers close a kept-alive connection between two requests, but not one before its first request. It is for servers
    on this machine: a proxy may close it.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.on_end: Callable[[], None] | None = on_end

    @classmethod
    async def open(cls, url: str, on_end: Callable[[], None]) -> "ProcessConnection":
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        loop = asyncio.get_running_loop()
        connection: ProcessConnection
        try:
            _, connection = await loop.create_connection(
                lambda: cls(on_end), parts.hostname or HOST, port, ssl=parts.scheme == "https" or None
            )
        except OSError as error:
            if lacks_descriptors(error):
                raise WorkerError(no_descriptors(url)) from error
            raise Unreachable(f"did not accept a connection ({error})") from error
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def eof_received(self) -> None:
        self.ended()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended()

    def ended(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    @property
    def has_ended(self) -> bool:
        return self.on_end is None

    def close(self) -> None:
        self.on_end = None
        self.transport.close()


async def within(limit_s: float, work: Awaitable[T]) -> T:
    async with asyncio.timeout(limit_s):
        return await work


def lacks_descriptors(error: BaseException) -> bool:
    """Whether this process, or its machine, is the cause. The lookup of a host's name hides it: so one is opened."""
    if any(isinstance(cause, OSError) and cause.errno in OUT_OF_DESCRIPTORS for cause in causes(error)):
        return True
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as found:
        return found.errno in OUT_OF_DESCRIPTORS
    return False


def causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                yield from causes(one)
        error = error.__cause__ or error.__context__


def no_descriptors(url: str) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"no file descriptor is left in this process for a connection to {url}: `ulimit -n` is {soft}, its hard limit "
        f"is {hard}. Raise both before the run starts, or lower actor_rollout_ref.rollout.max_num_seqs, which sets how "
        "many requests a server has at a time"
    )


def allowed_connections(wanted: int) -> int:
    """As many of `wanted` as this process can open. Raises the soft limit of descriptors as far as the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/proc/self/fd")
    in_use = len(list(folder.iterdir())) if folder.is_dir() else 0
    needed = in_use + SPARE_DESCRIPTORS + wanted
    if finite(soft) < needed:
        soft = min(needed, finite(hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    free = finite(soft) - in_use
    return max(1, min(wanted, free - min(SPARE_DESCRIPTORS, free // 2)))


def finite(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
