"""Connections of the client of servers."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from rloom.net import http as net
from rloom.net.http import Refused, Unreachable
from rloom.rollout.servers.http import Http
from rloom.rollout.servers.trtllm import TrtllmApi
from rloom.rollout.servers.wire import HEALTH
from tests.streams import Connections, turns

TURNS = 60  # of the event loop; a request ends after about 30
Number = int | None  # of turns; None: as many as it takes


def test_a_request_leaves_no_connection_open_wherever_it_is_cancelled() -> None:
    """A server aborts a request when its connection ends."""

    async def cancelled_after(number: Number) -> tuple[bool, int]:
        """Whether the request was cancelled, and connections that stay open."""
        served = Connections(answers)
        server = await asyncio.start_server(served.begin, "127.0.0.1")
        http = Http(TrtllmApi(), key=None, timeout_s=60)
        port = server.sockets[0].getsockname()[1]
        request = asyncio.ensure_future(http.send(f"http://127.0.0.1:{port}", HEALTH))
        await (asyncio.wait([request]) if number is None else turns(number))
        was_cancelled = request.cancel()
        await asyncio.wait([request])
        await http.close()
        await turns(TURNS)  # what the kernel has accepted arrives
        _, left = await asyncio.wait(served.open.values(), timeout=10) if served.open else ((), ())
        await served.end(server)
        return was_cancelled, len(left)

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionResetError):
            while await reader.read(1_000):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    found = [asyncio.run(cancelled_after(number)) for number in (*range(TURNS), None)]
    assert found[0][0] and not found[-1][0]  # from before the first step to after the answer
    assert [number for number, (_, left) in enumerate(found) if left] == []


def answers_of(*replies: bytes | None, in_pieces: bool = True) -> list[bytes | str]:
    """What the client gets for one request after the other, by a server that sends these, one for each request. None:
    it closes the connection. After the answers: the number of connections that the server has had."""

    async def ask() -> list[bytes | str]:
        left, accepted = list(replies), 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            while left and await reader.read(1_000):
                reply = left.pop(0)
                for part in (reply or b"").splitlines(keepends=True) if in_pieces else [reply or b""]:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if reply is None or not (b"Length" in reply or reply.endswith(b"0\r\n\r\n")):
                    break
            writer.close()

        served = Connections(serve)
        server = await asyncio.start_server(served.begin, "127.0.0.1")
        http, url = Http(TrtllmApi(), None, 60), f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found: list[bytes | str] = []
        for _ in replies:
            try:
                found.append(await http.send(url, HEALTH))
            except (Unreachable, Refused) as failure:
                found.append(str(failure))
        await http.close()
        await served.end(server)
        return [*found, str(accepted)]

    return asyncio.run(ask())


def test_a_body_has_a_length_or_comes_in_chunks_or_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    length = head + b"Content-Length: 4\r\n\r\na\nbc"
    chunks = head + b"Transfer-Encoding: chunked\r\n\r\n2\r\na\n\r\n2\r\nbc\r\n0\r\n\r\n"
    assert answers_of(length, length, chunks, length, head + b"\r\na\nbc") == [b"a\nbc"] * 5 + ["1"]


def test_an_interim_answer_is_passed_over() -> None:
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    for interim in (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"):
        assert answers_of(interim + final, final) == [b"ok", b"ok", "1"]


def test_what_follows_an_answer_is_not_the_answer_to_the_next_request() -> None:
    """A server or a proxy that answers twice: the connection is not used again."""
    first, second = (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n" + text for text in (b"one", b"two"))
    for follows in (first, b"x"):
        assert answers_of(first + follows, second, in_pieces=False) == [b"one", b"two", "2"]


def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    monkeypatch.setattr(net, "KEEP_ALIVE_S", 0.0)
    assert answers_of(answer, answer) == [b"ok", b"ok", "2"]


def test_a_redirection_is_no_success() -> None:
    found = answers_of(b"HTTP/1.1 307 Moved\r\nLocation: /x\r\nContent-Length: 2\r\n\r\nok")
    assert found == ["answered with HTTP status 307: ok", "1"]


def test_a_request_has_the_path_of_the_address_its_own_and_a_time_limit() -> None:
    """The server answers the first request, says something that nobody asked for, and answers no second request."""

    async def ask() -> tuple[list[bytes], str]:
        heads: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            if len(heads) == 1:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()
                await answered.wait()
                writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            await reader.read()

        answered, served, direct = asyncio.Event(), Connections(serve), net.DirectConnections()
        server = await asyncio.start_server(served.begin, "127.0.0.1")
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/one/"
        send = partial(direct.send, url, "/two?x=1", method="GET", headers={"A": "b"}, body=b"")
        assert await send(limit_s=60.0) == b"ok"
        (idle,) = direct.idle[url]
        answered.set()
        while idle.is_open:
            await asyncio.sleep(0)
        with pytest.raises(Unreachable) as late:
            await send(limit_s=0.2)
        await direct.close()
        await served.end(server)
        return heads, str(late.value)

    heads, late = asyncio.run(asyncio.wait_for(ask(), 60))
    assert [head.split(b"\r\n")[0] for head in heads] == [b"GET /one/two?x=1 HTTP/1.1"] * 2
    assert late == "did not answer /two?x=1 in 0.2 s"


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("https://a.example", ("a.example", 443, True)),
        ("http://a.example", ("a.example", 80, None)),
        ("http://[::1]:8000/v1", ("::1", 8000, None)),
    ],
)
def test_an_address_without_a_port_has_that_of_its_scheme(url: str, reached: tuple[Any, ...]) -> None:
    async def connect() -> tuple[Any, ...]:
        found: list[tuple[Any, ...]] = []

        async def create(make: Any, host: str, port: int, *, ssl: Any) -> tuple[None, None]:
            found.append((host, port, ssl))
            return None, None

        asyncio.get_running_loop().create_connection = create  # type: ignore[method-assign, assignment]
        await net.open_connection(url)
        return found[0]

    assert asyncio.run(connect()) == reached


def test_headers_without_end_are_no_answer() -> None:
    found = answers_of(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000 + b"\r\nContent-Length: 2\r\n\r\nok")
    assert found[0] == "gave no answer to /health (RemoteProtocolError: Receive buffer too long)"


def test_a_connection_that_ends_before_the_answer_does_is_no_answer() -> None:
    cut = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nab"
    refused = b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
    assert answers_of(None, refused, cut, b"no HTTP\r\n\r\n") == [
        "gave no answer to /health (ConnectionResetError: the server closed the connection)",
        "answered with HTTP status 503: busy",
        "gave no answer to /health (RemoteProtocolError: peer closed connection without sending complete message body "
        "(incomplete chunked read))",
        "gave no answer to /health (RemoteProtocolError: illegal status line: bytearray(b'no HTTP'))",
        "3",
    ]


def test_a_request_on_a_connection_that_the_server_closed_while_idle_is_sent_over_another() -> None:
    """Once: the server closes each of the last two, and the second of them is a new connection."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\na\nbc"
    no_answer = "gave no answer to /health (ConnectionResetError: the server closed the connection)"
    assert answers_of(answer, None, answer, None, None)[:3] == [b"a\nbc", b"a\nbc", no_answer]
