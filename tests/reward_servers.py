"""Reward servers in threads of the test process: each answers requests as its test says."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rloom.rewards.remote import RemoteReward
from rloom.types import Sample, Score


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None  # announced, if not that of the body: the body is cut off
    pause_s: float = 0.0  # after each byte of the body


Answer = Callable[[dict[str, Any]], Any]  # request -> a Reply, or a value that is sent as JSON


class TestServer(ThreadingHTTPServer):
    __test__ = False  # not a class of tests
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/get_reward"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TestServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.headers.append(dict(self.headers))
        found = self.server.answer(request)
        reply = found if isinstance(found, Reply) else Reply(json.dumps(found).encode())
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
        self.end_headers()
        for part in [bytes([byte]) for byte in reply.body] if reply.pause_s else [reply.body]:
            self.wfile.write(part)
            time.sleep(reply.pause_s)
        self.close_connection = reply.length is not None

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client gave up
            self.close_connection = True


@contextmanager
def serving(answer: Answer) -> Iterator[TestServer]:
    server = TestServer(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def dead_url(port: int = 1) -> str:
    """The URL of a port on which nothing listens, and which no process gets when it asks for a free one."""
    return f"http://127.0.0.1:{port}/get_reward"


class Scoring:
    """A RemoteReward in an event loop of its own thread, as a run has it."""

    def __init__(self, *urls: str, **settings: Any) -> None:
        defaults = {"timeout_s": 30.0, "max_retries": 2, "concurrency": 4, "batch_size": 16}
        self.reward = RemoteReward(urls, **{**defaults, **settings})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def scores(self, samples: Sequence[Sample]) -> list[Score]:
        """Each answer is a group of its own, all enqueued in one iteration of the loop."""
        groups = [(sample,) for sample in samples]
        scored = asyncio.run_coroutine_threadsafe(self.reward.score(groups), self._loop).result(120)
        return [score for [score] in scored]

    def close(self) -> None:
        self.reward.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def scoring(*urls: str, **settings: Any) -> Iterator[Scoring]:
    made = Scoring(*urls, **settings)
    try:
        yield made
    finally:
        made.close()


def answers(*responses: str) -> list[Sample]:
    return [Sample("math_reasoning", "15 + 27? ", response, "42", {"index": i}) for i, response in enumerate(responses)]


def lengths(request: dict[str, Any]) -> dict[str, Any]:
    """The reward of an answer is its number of characters."""
    return {"rewards": [len(response) for response in request["responses"]]}
