"""One HTTP request to a reward server. A failure is a RequestFailed with its reason."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from rloom.rewards.remote_contract import shortened
from rloom.rewards.retry_after import retry_after_s

LONGEST_BODY = 32 << 20  # bytes
LONGEST_ERROR = 10_000  # bytes of an error's body that are read

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
            async with asyncio.timeout(self._timeout_s), self._client.stream("POST", url, content=body) as response:
                found = await limited_body(response)
        except TimeoutError as error:
            raise RequestFailed(f"did not answer in reward_model.remote.timeout_s={self._timeout_s:g} s") from error
        except ERRORS as error:  # no connection, or closed before the end of the body
            raise RequestFailed(described(error), is_unreachable=isinstance(error, UNREACHABLE)) from error
        except RequestFailed:
            raise
        except Exception as error:  # one of the HTTP library that was not foreseen: only this request fails
            raise RequestFailed(described(error)) from error
        if not response.is_success:
            raise refused(response, found)
        return found

    async def close(self) -> None:
        await self._client.aclose()


async def limited_body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > LONGEST_BODY:
            raise RequestFailed(f"returned a body of more than {LONGEST_BODY >> 20} MiB")
    return bytes(body)


def refused(response: httpx.Response, body: bytes) -> RequestFailed:
    status = response.status_code
    text = body[:LONGEST_ERROR].decode("utf-8", "replace")
    return RequestFailed(
        f"answered with HTTP status {status}: {shortened(text) or 'an empty body'}",
        is_refusal=status in REFUSALS,
        may_be_one_answer=status in (*REFUSALS, *FAULTS),
        retry_after_s=retry_after_s(response.headers) or 0.0,
    )


def described(error: Exception) -> str:
    if isinstance(error, UNREACHABLE):
        return f"cannot be reached ({shortened(str(error)) or type(error).__name__})"
    if not isinstance(error, ERRORS):
        return f"returned an answer that cannot be read ({type(error).__name__}: {shortened(str(error))})"
    return f"ended the connection without an answer ({type(error).__name__}: {shortened(str(error))})"


def unreachable(urls: Sequence[str], timeout_s: float) -> dict[str, str]:
    """The URLs without a server, and why. Any HTTP response counts: servers may answer only POST requests."""

    def fault(url: str) -> str | None:
        try:
            with httpx.stream("GET", url, timeout=timeout_s):  # whatever its body is
                return None
        except ERRORS as error:
            is_timeout = isinstance(error, httpx.TimeoutException)
            return f"did not answer in {timeout_s:g} s" if is_timeout else described(error)

    with ThreadPoolExecutor(len(urls)) as threads:
        found = zip(urls, threads.map(fault, urls), strict=True)
        return {url: reason for url, reason in found if reason is not None}
