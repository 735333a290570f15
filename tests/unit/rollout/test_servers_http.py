"""Connections of the client of servers."""

import asyncio
from contextlib import suppress

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


def answers_of(*replies: bytes | None) -> list[bytes | str]:
    """What the client gets for one request after the other, by a server that sends these, one for each request. None:
    it closes the connection. After the answers: the number of connections that the server has had."""

    async def ask() -> list[bytes | str]:
        left, accepted = list(replies), 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            while left and await reader.read(1_000):
                reply = left.pop(0)
                for part in (reply or b"").splitlines(keepends=True):  # in pieces
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
