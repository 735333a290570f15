"""HTTP requests to servers, in an event loop of a thread of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

from rloom.rollout.servers.wire import HEALTH, Call, Wire

T = TypeVar("T")
HEALTH_TIMEOUT_S = 30.0  # SGLang generates a token for it, and waits up to 20 s


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
    """One client for all servers. Proxies of the environment do not apply: servers are on the user's own machines."""

    def __init__(self, wire: Wire, key: str | None, timeout_s: float) -> None:
        self.wire, self.key, self.timeout_s = wire, key, timeout_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)

    async def send(self, url: str, call: Call, timeout_s: float | None = None) -> bytes:
        limit_s, body = timeout_s or self.timeout_s, call.body
        headers = {"Content-Type": "application/json", **self.wire.headers(self.key, body)}
        method, target = "GET" if call.is_get else "POST", url.rstrip("/") + call.path
        try:
            response = await within(limit_s, self.client.request(method, target, content=body, headers=headers))
        except TimeoutError:
            raise Unreachable(f"did not answer {call.path} in {limit_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(f"gave no answer to {call.path} ({type(error).__name__}: {error})") from error
        if not response.is_success:
            raise Refused(response.status_code, response.text)
        return response.content

    async def is_healthy(self, url: str) -> bool:
        try:
            await self.send(url, HEALTH, HEALTH_TIMEOUT_S)
        except (Unreachable, Refused):
            return False
        return True

    async def close(self) -> None:
        await self.client.aclose()


async def within(limit_s: float, work: Awaitable[T]) -> T:
    async with asyncio.timeout(limit_s):
        return await work
