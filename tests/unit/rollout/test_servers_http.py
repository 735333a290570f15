"""Connections of the client of servers."""

import asyncio
from contextlib import suppress

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
