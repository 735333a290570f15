"""HTTP requests and their failures. Clients belong to the event loop in which they are used."""

import asyncio
import errno
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import h11
import httpx

from rloom.errors import WorkerError
from rloom.net.retry import retry_after_s

T = TypeVar("T")
Headers = list[tuple[str, str]]
LOCALHOST = "127.0.0.1"
KEEP_ALIVE_S = 30.0  # servers close an idle connection earlier; a router between may forget it without a word
SPARE_DESCRIPTORS = 256  # for what else the process opens: files, shared memory, process groups
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
CLOSED = "the server closed the connection"
HTTPX_ERRORS = (httpx.HTTPError, httpx.InvalidURL)
NO_CONNECTION = (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol)
LONGEST_BODY = 32 << 20  # bytes
LONGEST_TEXT = 200  # characters of a server's text in a reason


class RequestFailed(Exception):
    """A request without a usable answer. The message completes "the server ..."."""

    status: int | None = None  # of HTTP, if the server answered
    retry_after_s: float | None = None  # as the server requires
    has_connection = True  # False: there is no server at this address


class Unreachable(RequestFailed):
    """No answer: no connection, one that was closed, or none in time."""

    def __init__(self, reason: str, *, has_connection: bool = True) -> None:
        super().__init__(reason)
        self.has_connection = has_connection


class Refused(RequestFailed):
    """An HTTP status that is no success."""

    def __init__(self, status: int, text: str, *, body: bytes = b"", retry_after_s: float | None = None) -> None:
        super().__init__(f"answered with HTTP status {status}: {text or 'an empty body'}")
        self.status, self.body, self.retry_after_s = status, body, retry_after_s

    @property
    def is_fault_of_the_request(self) -> bool:
        assert self.status is not None
        return 400 <= self.status < 500 and self.status not in (408, 429)


class HttpClient:
    """Requests to any address. Proxies are those of the environment (HTTP_PROXY, NO_PROXY), as with curl."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str],
        connections: int,
        max_connections: int | None = None,
        follow_redirects: bool = False,
    ) -> None:
        # one limit over the whole request: httpx's own limits apply to each read, which a slow server restarts
        self._new_client = partial(
            httpx.AsyncClient,
            timeout=None,
            headers={"Content-Type": "application/json", **headers},
            verify=httpx.create_ssl_context(),
            follow_redirects=follow_redirects,
            limits=httpx.Limits(max_keepalive_connections=connections, max_connections=max_connections),
        )
        self._client = self._new_client()
        self._unfinished: Counter[httpx.AsyncClient] = Counter()  # requests of each client, also of replaced ones

    async def post(self, url: str, body: bytes) -> bytes:
        """The caller limits its time. RequestFailed: no answer, or no success."""
        client = self._client
        self._unfinished[client] += 1
        try:
            return await self._post(client, url, body)
        except asyncio.CancelledError:
            # the pool of httpcore 1.0 may keep the connection of a cancelled request for ever
            if client is self._client:
                self._client = self._new_client()
            raise
        finally:
            self._unfinished[client] -= 1
            if client is not self._client and not self._unfinished[client]:
                del self._unfinished[client]
                await client.aclose()

    async def _post(self, client: httpx.AsyncClient, url: str, body: bytes) -> bytes:
        try:
            async with client.stream("POST", url, content=body) as response:
                found = await limited_body(response)
        except HTTPX_ERRORS as error:  # no connection, or closed before the end of the body
            raise Unreachable(described(error), has_connection=not isinstance(error, NO_CONNECTION)) from error
        except RequestFailed:
            raise
        except Exception as error:  # one of the HTTP library that was not foreseen: only this request fails
            raise RequestFailed(described(error)) from error
        if not response.is_success:
            text = shortened(found[: 50 * LONGEST_TEXT].decode("utf-8", "replace"))
            raise Refused(response.status_code, text, body=found, retry_after_s=retry_after_s(response.headers))
        return found

    async def close(self) -> None:
        for client in {self._client, *self._unfinished}:
            await client.aclose()


async def limited_body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > LONGEST_BODY:
            raise RequestFailed(f"returned a body of more than {LONGEST_BODY >> 20} MiB")
    return bytes(body)


def described(error: Exception) -> str:
    if isinstance(error, NO_CONNECTION):
        return f"cannot be reached ({shortened(str(error)) or type(error).__name__})"
    if not isinstance(error, HTTPX_ERRORS):
        return f"returned an answer that cannot be read ({type(error).__name__}: {shortened(str(error))})"
    return f"ended the connection without an answer ({type(error).__name__}: {shortened(str(error))})"


def connection_fault(url: str, timeout_s: float) -> str | None:
    """Why there is no server. Any HTTP response counts: servers may answer only POST requests. It blocks."""
    try:
        with httpx.stream("GET", url, timeout=timeout_s):  # whatever its body is
            return None
    except HTTPX_ERRORS as error:
        is_timeout = isinstance(error, httpx.TimeoutException)
        return f"did not answer in {timeout_s:g} s" if is_timeout else described(error)


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 3]}..."


class DirectConnections:
    """Kept-alive connections to the user's own servers. A request takes an idle one or opens another; callers bound
    their number.

    Not httpx: its pool looks at all connections and all waiting requests at each event, which is quadratic in requests.
    Not httpcore: a request takes three times as long with it. Proxies of the environment do not apply: servers are on
    the user's own machines.
    """

    def __init__(self) -> None:
        self.idle: defaultdict[str, list[Connection]] = defaultdict(list)  # by the server's URL

    async def send(
        self, url: str, path: str, *, method: str, headers: Mapping[str, str], body: bytes, limit_s: float
    ) -> bytes:
        try:
            status, content = await within(limit_s, self.exchange(url, path, method, headers, body))
        except TimeoutError:
            raise Unreachable(f"did not answer {path} in {limit_s:g} s") from None
        except (OSError, h11.ProtocolError) as error:
            if lacks_descriptors(error):
                raise WorkerError(no_descriptors(url)) from error
            raise Unreachable(f"gave no answer to {path} ({type(error).__name__}: {error})") from error
        if not 200 <= status < 300:
            raise Refused(status, content.decode(errors="replace")[:500].strip())
        return content

    async def exchange(
        self, url: str, path: str, method: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        """An exchange that fails or is cancelled closes its connection, at which servers abort the request.

        A server may close an idle connection while a request is on its way, which is then sent once more. So is a
        request whose server ended before it answered: another process may get it, which callers tell by its identity.
        """
        parts = urlsplit(url.rstrip("/"))
        own = {"Host": parts.netloc, "Content-Length": str(len(body))}
        request = method, parts.path + path, [*own.items(), *headers.items()], body
        if (idle := self.idle_connection(url)) is not None:
            try:
                return await self.exchange_over(idle, url, *request)
            except ConnectionError:
                if idle.has_received:
                    raise
        return await self.exchange_over(await open_connection(url), url, *request)

    async def exchange_over(
        self, connection: "Connection", url: str, method: str, target: str, headers: Headers, body: bytes
    ) -> tuple[int, bytes]:
        try:
            answer = await connection.exchange(method, target, headers, body)
        except BaseException:
            connection.transport.abort()
            raise
        if connection.is_open:
            self.idle[url].append(connection)
        return answer

    def idle_connection(self, url: str) -> "Connection | None":
        idle = self.idle[url]
        while idle:
            connection = idle.pop()  # the one that was used last
            if connection.is_open and time.monotonic() < connection.answered_s + KEEP_ALIVE_S:
                return connection
            connection.transport.abort()
        return None

    async def close(self) -> None:
        for connection in [one for idle in self.idle.values() for one in idle]:
            connection.transport.abort()


class Connection(asyncio.Protocol):
    """One exchange at a time by HTTP/1.1."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.state = h11.Connection(h11.CLIENT)
        self.answer: asyncio.Future[tuple[int, bytes]] | None = None
        self.status, self.parts = 0, list[bytes]()
        self.is_open, self.answered_s = True, 0.0
        self.has_received = False  # anything of the answer

    async def exchange(self, method: str, target: str, headers: Headers, body: bytes) -> tuple[int, bytes]:
        """(status, body) of the answer. OSError: there is none."""
        request = h11.Request(method=method, target=target, headers=headers)
        sent = [self.state.send(event) or b"" for event in (request, h11.Data(body), h11.EndOfMessage())]
        if not self.is_open:
            raise ConnectionResetError(CLOSED)
        self.status, self.parts, self.has_received = 0, [], False
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(b"".join(sent))
        return await self.answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None or answer.done():  # nothing was asked for
            self.close()
            return
        self.has_received = True
        try:
            self.state.receive_data(data)
            while not answer.done() and (event := self.state.next_event()) is not h11.NEED_DATA:
                self.take(event, answer)
        except h11.ProtocolError as error:
            answer.set_exception(error)

    def take(self, event: object, answer: "asyncio.Future[tuple[int, bytes]]") -> None:
        if isinstance(event, h11.Response):
            self.status = event.status_code
        elif isinstance(event, h11.Data):
            self.parts.append(bytes(event.data))
        elif isinstance(event, h11.EndOfMessage):
            # what follows the answer would be taken for that of the next request
            if self.state.our_state is self.state.their_state is h11.DONE and not self.state.trailing_data[0]:
                self.state.start_next_cycle()
                self.answered_s = time.monotonic()
            else:
                self.close()
            answer.set_result((self.status, b"".join(self.parts)))

    def eof_received(self) -> None:
        self.is_open = False
        if self.state.their_state is h11.SEND_BODY:  # the end of a body without a length
            self.data_received(b"")

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or ConnectionResetError(CLOSED))

    def close(self) -> None:
        self.is_open = False
        self.transport.abort()


async def open_connection(url: str) -> Connection:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    _, connection = await asyncio.get_running_loop().create_connection(
        Connection, parts.hostname or LOCALHOST, port, ssl=parts.scheme == "https" or None
    )
    return connection


async def within(limit_s: float, work: Awaitable[T]) -> T:
    async with asyncio.timeout(limit_s):
        return await work


def lacks_descriptors(error: BaseException) -> bool:
    """Whether a connection failed because this process or its machine has no descriptor left. The lookup of a host's
    name hides that error: so a file is opened."""
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
