"""One HTTP request to a reward server. A failure is a RequestFailed with its reason."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from rloom.rewards.remote_contract import shortened

# The server refuses this request, and would refuse it again; another split of its answers may be accepted.
REFUSALS = (400, 413, 422)
# The server failed on this request: perhaps on one of its answers.
FAULTS = (500,)
ERRORS = (httpx.HTTPError, httpx.InvalidURL)
UNREACHABLE = (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol)


@dataclass(eq=False)
class RequestFailed(Exception):
    """`reason` completes "the server ..."."""

    reason: str
    is_unreachable: bool = False  # there is no connection to the server
    is_refusal: bool = False  # not to be repeated, and the server is not to blame
    may_be_one_answer: bool = False  # the other answers of the request may be scored without it
    retry_after_s: float = 0.0


class RewardClient:
    """Keeps connections open. Proxies are those of the environment (HTTP_PROXY, NO_PROXY), as with curl."""

    def __init__(self, *, timeout_s: float, headers: Mapping[str, str], connections: int) -> None:
        self._timeout_s = timeout_s
        # one limit over the whole request: httpx's own limits apply to each read, which a slow server restarts
        self._client = httpx.AsyncClient(
            timeout=None,
            headers={"Content-Type": "application/json", **headers},
            limits=httpx.Limits(max_keepalive_connections=connections),
        )

    async def post(self, url: str, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.post(url, content=body)
        except TimeoutError as error:
            raise RequestFailed(f"did not answer in reward_model.remote.timeout_s={self._timeout_s:g} s") from error
        except ERRORS as error:  # no connection, or closed before the end of the body
            raise RequestFailed(described(error), is_unreachable=isinstance(error, UNREACHABLE)) from error
        if not response.is_success:
            raise refused(response)
        return response.content

    async def close(self) -> None:
        await self._client.aclose()


def refused(response: httpx.Response) -> RequestFailed:
    status = response.status_code
    return RequestFailed(
        f"answered with HTTP status {status}: {shortened(response.text) or 'an empty body'}",
        is_refusal=status in REFUSALS,
        may_be_one_answer=status in (*REFUSALS, *FAULTS),
        retry_after_s=seconds(response.headers.get("Retry-After", "")),
    )


def seconds(retry_after: str) -> float:
    """The header's number of seconds; 0 for a date or none."""
    return float(retry_after) if retry_after.isdigit() else 0.0


def described(error: Exception) -> str:
    if isinstance(error, UNREACHABLE):
        return f"cannot be reached ({shortened(str(error)) or type(error).__name__})"
    return f"ended the connection without an answer ({type(error).__name__}: {shortened(str(error))})"


def unreachable(urls: Sequence[str], timeout_s: float) -> dict[str, str]:
    """The URLs without a server, and why. Any HTTP response counts: servers may answer only POST requests."""

    def fault(url: str) -> str | None:
        try:
            httpx.get(url, timeout=timeout_s)
        except ERRORS as error:
            is_timeout = isinstance(error, httpx.TimeoutException)
            return f"did not answer in {timeout_s:g} s" if is_timeout else described(error)
        return None

    with ThreadPoolExecutor(len(urls)) as threads:
        found = zip(urls, threads.map(fault, urls), strict=True)
        return {url: reason for url, reason in found if reason is not None}
