"""A server that answers each path at once with a recorded body: `python benchmarks/replay_server.py FILE`.

FILE is JSON, bodies by path. Prints its port, and at the end of its input the number of connections that it has had. It
imports nothing but Python, so that several start fast.
"""

import asyncio
import json
import sys
from itertools import count
from pathlib import Path


class Replay(asyncio.Protocol):
    """One connection."""

    transport: asyncio.Transport

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.answers, self.received = answers, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not found or (lengths and len(body) < int(lengths[0].split(b":")[1])):
            return
        self.received = b""
        answer = self.answers[head.split(b" ", 2)[1].decode()]
        self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))


async def serve(file: Path) -> None:
    answers = {path: json.dumps(body).encode() for path, body in json.loads(file.read_text()).items()}
    connections = count()

    def connected() -> Replay:
        next(connections)
        return Replay(answers)

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(next(connections), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
