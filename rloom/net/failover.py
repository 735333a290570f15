"""Several servers of one kind: which of them gets the next request, and when one that failed is tried again."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rloom.net.http import RequestFailed
from rloom.net.loop import Signal
from rloom.net.retry import Backoff

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3  # after which a server counts as down; one that cannot be reached does at once
FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 30.0
LOG_INTERVAL_S = 60.0  # between two messages that the same server failed


class NoServer(Exception):
    """No server has answered for as long as requests wait. The message has the reason of each."""


@dataclass(eq=False)
class PooledServer:
    url: str
    requests: int = 0  # in flight
    answers: int = 0  # in flight
    failures: int = 0  # in a row
    back_offs: int = 0  # in a row; 0: it is up
    down_at_s: float = 0.0  # begin of the last back-off
    retry_at_s: float = 0.0
    reason: str = ""  # of the last failure
    logged_at_s: float | None = None  # of the last message that it is down

    @property
    def is_down(self) -> bool:
        return self.back_offs > 0


class ServerPool:
    """A server that is down gets no requests during a back-off, then one at a time until it answers. The back-off
    doubles with each of these that fails. All methods are called in one event loop."""

    def __init__(self, urls: Sequence[str], *, concurrency: int, no_server_timeout_s: float) -> None:
        self._servers = [PooledServer(url) for url in urls]
        self._concurrency = concurrency
        self._no_server_timeout_s = no_server_timeout_s
        self._none_since_s: float | None = None  # no server has answered since
        self._changed = Signal()
        self._backoff = Backoff(FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S)

    async def acquire(self, avoid: PooledServer | None = None) -> PooledServer:
        """The server with the fewest answers in flight, of those that can take a request. `release` it afterwards.

        `avoid`: the server on which the request failed; it is taken if no other can take the request.
        """
        while True:
            now_s = time.monotonic()
            free = [server for server in self._servers if self._is_free(server, now_s)]
            if free:
                server = min(free, key=lambda server: (server is avoid, server.answers))
                server.requests += 1
                return server
            await self._changed.wait(self._longest_wait_s(now_s))

    def release(self, server: PooledServer, answers: int) -> None:
        server.requests -= 1
        server.answers -= answers
        self._changed.notify()

    def has_other(self, server: PooledServer) -> bool:
        return any(other is not server and not other.is_down for other in self._servers)

    def back_off_s(self, failures: int) -> float:
        """The wait after this many failures in a row."""
        return self._backoff.delay_s(failures, None)

    def succeeded(self, server: PooledServer) -> None:
        self._none_since_s = None
        server.failures = 0
        if server.is_down:
            server.back_offs, server.retry_at_s = 0, 0.0
            log.info(f"The reward server {server.url} answers again.")
            self._changed.notify()

    def failed(self, server: PooledServer, failure: RequestFailed, *, sent_at_s: float) -> None:
        now_s = time.monotonic()
        server.reason = str(failure)
        server.failures += 1
        server.retry_at_s = max(server.retry_at_s, now_s + min(failure.retry_after_s or 0.0, LONGEST_BACK_OFF_S))
        is_of_this_back_off = server.is_down and sent_at_s < server.down_at_s  # sent before: the same cause
        is_tolerated = failure.has_connection and not server.is_down and server.failures < FAILURES_IN_A_ROW
        if is_of_this_back_off or is_tolerated:
            return
        server.back_offs += 1
        server.down_at_s = now_s
        server.retry_at_s = max(server.retry_at_s, now_s + self.back_off_s(server.back_offs))
        if self._none_since_s is None and all(server.is_down for server in self._servers):
            self._none_since_s = now_s
        self._report(server, now_s)
        self._changed.notify()

    def _is_free(self, server: PooledServer, now_s: float) -> bool:
        limit = 1 if server.is_down else self._concurrency
        return server.requests < limit and now_s >= server.retry_at_s

    def _longest_wait_s(self, now_s: float) -> float | None:
        """Until a server may be tried again, or the limit. None: until a request ends. NoServer: the limit is over."""
        ends_s = [server.retry_at_s for server in self._servers if server.retry_at_s > now_s]
        if self._none_since_s is not None:
            limit_ends_s = self._none_since_s + self._no_server_timeout_s
            if now_s >= limit_ends_s:
                reasons = "; ".join(f"{server.url} {server.reason}" for server in self._servers)
                raise NoServer(f"no reward server answers: {reasons}")
            ends_s.append(limit_ends_s)
        return min(ends_s) - now_s if ends_s else None

    def _report(self, server: PooledServer, now_s: float) -> None:
        is_recent = server.logged_at_s is not None and now_s - server.logged_at_s < LOG_INTERVAL_S
        if server.back_offs > 1 or is_recent:
            return
        server.logged_at_s = now_s
        others = sum(not other.is_down for other in self._servers)
        log.warning(
            f"The reward server {server.url} {server.reason}. It is tried again after a growing back-off; "
            + (f"its requests go to {others} other server{'s' * (others > 1)}." if others else "no other answers.")
        )
