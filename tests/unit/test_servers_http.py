"""Connections of the client of servers."""

import asyncio
from contextlib import suppress

from rloom.rollout.servers.http import Http
from rloom.rollout.servers.trtllm import TrtllmWire
from rloom.rollout.servers.wire import HEALTH

TURNS = 60  # of the event loop; a request ends after about 30


def test_a_request_leaves_no_connection_open_wherever_it_is_cancelled() -> None:
    """A server aborts a request when its connection ends."""

    async def cancelled_after(turns: int) -> tuple[bool, int]:
        """Whether the request was cancelled, and connections that are open afterwards."""
        open_connections: set[asyncio.StreamWriter] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            open_connections.add(writer)
            with suppress(ConnectionResetError):
                while await reader.read(1_000):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            open_connections.discard(writer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1")
        http = Http(TrtllmWire(), key=None, timeout_s=5)
        port = server.sockets[0].getsockname()[1]
        request = asyncio.ensure_future(http.send(f"http://127.0.0.1:{port}", HEALTH))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_cancelled = request.cancel()
        await asyncio.wait([request])
        await http.close()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        server.close()
        left = len(open_connections)
        for writer in open_connections:
            writer.close()
        return was_cancelled, left

    found = [asyncio.run(cancelled_after(turns)) for turns in range(TURNS)]
    assert found[0][0] and not found[-1][0]  # from before the first step to after the answer
    assert [turns for turns, (_, left) in enumerate(found) if left] == []
