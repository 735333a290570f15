"""Several reward servers: which of them gets the next request, and when one that failed is tried again."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_BACK_OFF_S = 0.5  # doubles with each failure in a row
LONGEST_BACK_OFF_S = 30.0
LOG_INTERVAL_S = 60.0  # between two messages that the same server failed


class NoServer(Exception):
    """No server has answered for as long as requests wait. The message has the reason of each."""


@dataclass(eq=False)
class Server:
    url: str
    requests: int = 0  # in flight
    answers: int = 0  # in flight
    failures: int = 0  # in a row; 0: it answers
    failed_at_s: float = 0.0
    retry_at_s: float = 0.0
    reason: str = ""  # of the last failure
    logged_at_s: float | None = None  # of the last message that it failed


class Servers:
    """A server that fails gets no requests during a back-off, which doubles with each failure in a row, then one
    request at a time until it answers. All methods are called in one event loop."""

    def __init__(self, urls: Sequence[str], *, concurrency: int, patience_s: float) -> None:
        self._servers = [Server(url) for url in urls]
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._none_since_s: float | None = None  # no server has answered since
        self._changed = asyncio.Event()  # replaced whenever it is set
        self._jitter = random.Random()  # the global generator's state belongs to the run and is saved with it

    async def acquire(self) -> Server:
        """The server with the fewest answers in flight, of those that can take a request. `release` it afterwards."""
        while True:
            now_s = time.monotonic()
            free = [server for server in self._servers if self._is_free(server, now_s)]
            if free:
                server = min(free, key=lambda server: server.answers)
                server.requests += 1
                return server
            await self._change(self._longest_wait_s(now_s))

    def release(self, server: Server, answers: int) -> None:
        server.requests -= 1
        server.answers -= answers
        self._notify()

    def succeeded(self, server: Server) -> None:
        self._none_since_s = None
        if server.failures:
            server.failures, server.retry_at_s = 0, 0.0
            if server.logged_at_s is not None:
                log.info(f"The reward server {server.url} answers again.")
            self._notify()

    def failed(self, server: Server, reason: str, *, sent_at_s: float, retry_after_s: float = 0.0) -> None:
        """A request that was sent before the last failure does not extend the back-off: it failed for one cause."""
        now_s = time.monotonic()
        server.reason = reason
        if server.failures and sent_at_s < server.failed_at_s:
            return
        server.failures += 1
        server.failed_at_s = now_s
        back_off_s = min(FIRST_BACK_OFF_S * 2 ** (server.failures - 1), LONGEST_BACK_OFF_S)
        wait_s = max(back_off_s * self._jitter.uniform(0.5, 1), min(retry_after_s, LONGEST_BACK_OFF_S))
        server.retry_at_s = now_s + wait_s
        if self._none_since_s is None and all(server.failures for server in self._servers):
            self._none_since_s = now_s
        self._report(server, now_s)
        self._notify()

    def _is_free(self, server: Server, now_s: float) -> bool:
        limit = 1 if server.failures else self._concurrency
        return server.requests < limit and now_s >= server.retry_at_s

    def _longest_wait_s(self, now_s: float) -> float | None:
        """Until a server may be tried again, or the patience ends. None: until a request ends. NoServer: it ended."""
        ends_s = [server.retry_at_s for server in self._servers if server.retry_at_s > now_s]
        if self._none_since_s is not None:
            patience_ends_s = self._none_since_s + self._patience_s
            if now_s >= patience_ends_s:
                reasons = "; ".join(f"{server.url} {server.reason}" for server in self._servers)
                raise NoServer(f"no reward server answers: {reasons}")
            ends_s.append(patience_ends_s)
        return min(ends_s) - now_s if ends_s else None

    async def _change(self, timeout_s: float | None) -> None:
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _report(self, server: Server, now_s: float) -> None:
        if server.logged_at_s is not None and now_s - server.logged_at_s < LOG_INTERVAL_S:
            return
        if server.failures > 1 and server.logged_at_s is not None:  # still the failure that was reported
            return
        server.logged_at_s = now_s
        others = sum(not other.failures for other in self._servers)
        log.warning(
            f"The reward server {server.url} {server.reason}. It is tried again after a growing back-off; "
            + (f"its requests go to {others} other server{'s' * (others > 1)}." if others else "no other answers.")
        )
