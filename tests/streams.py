"""Servers of tests over asyncio's streams, which leave no connection open when they end."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Connections:
    """A server's connections. A cancelled handler may not have begun: its connection is closed here, not by it."""

    def __init__(self, handle: Handler) -> None:
        self.handle = handle
        self.open: dict[asyncio.StreamWriter, asyncio.Future[None]] = {}

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """asyncio calls it as a connection is accepted, before any task runs."""
        self.open[writer] = asyncio.ensure_future(self.handle(reader, writer))

    async def end(self, server: asyncio.Server) -> None:
        server.close()
        await turns(5)  # what was accepted arrives at `begin`
        for task in self.open.values():
            task.cancel()
        await asyncio.gather(*self.open.values(), return_exceptions=True)
        for writer in self.open:
            writer.close()
        await turns(5)  # a closed connection releases its socket in the next turn of the loop


async def turns(number: int) -> None:
    """Of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


@contextmanager
def listening(handle: Handler) -> Iterator[int]:
    """The port of a server whose event loop runs in a thread of its own."""
    loop, connections = asyncio.new_event_loop(), Connections(handle)
    server = loop.run_until_complete(asyncio.start_server(connections.begin, "127.0.0.1", 0, backlog=512))
    thread = threading.Thread(target=loop.run_forever, name="server of a test", daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(connections.end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
