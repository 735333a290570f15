"""Which server gets a request, and when: each has a bounded number of requests at a time, and others wait here.

The answers to one prompt go to one server, which computes the prompt's keys once. All requests of a conversation go to
the server of the first one, which has their keys, as long as it can be used. A request costs as much work here however
many wait. All methods are called in the event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rloom.rollout.servers.launch import ServerProcess
from rloom.rollout.servers.wire import Sender

Prompt = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class QueuedRequest:
    """A request that waits for a server."""

    prompt: Prompt
    server: "asyncio.Future[Server]"


@dataclass(eq=False)
class Server:
    url: str
    process: ServerProcess | None = None  # None: a server of the user's
    is_up: bool = False
    is_gone: bool = False  # not used again
    version: int | None = None  # of its weights; None: not those of the trainer
    label: str | None = None  # of the update that it got last; None with `version`
    instance: str | None = None  # of its process, where the engine has a route for it
    asleep: set[str] = field(default_factory=set)  # parts of its memory that are released
    unfinished: int = 0  # requests that it has
    queue: deque[QueuedRequest] = field(default_factory=deque)  # requests for it, beyond those
    failures: int = 0  # of health checks in a row
    restarts: int = 0
    failures_since_answer: int = 0  # failures since its last answer
    reason: str = "has not answered yet"
    sender: Sender | None = None
    sends: set[asyncio.Timeout] = field(default_factory=set)  # of requests without an answer yet; each ends when due
    recovering: asyncio.Lock = field(default_factory=asyncio.Lock)
    confirmed_s: float = 0.0  # when its identity was read last
    reading: "asyncio.Task[None] | None" = None  # of its identity
    next_reading: "asyncio.Task[None] | None" = None  # not begun yet

    @property
    def load(self) -> int:
        return self.unfinished + len(self.queue)


class RequestQueues:
    def __init__(self, servers: Sequence[Server], max_requests: int, is_usable: Callable[[Server], bool]) -> None:
        self.servers, self.is_usable = servers, is_usable
        self.max_requests = max_requests  # of one server
        self.waiting: dict[Prompt, deque[QueuedRequest]] = {}  # requests without a server, oldest first
        self.server_of: dict[Prompt, Server] = {}
        self.unfinished: Counter[Prompt] = Counter()
        self.server_of_conversation: dict[int, Server] = {}

    async def acquire(self, prompt: Prompt, conversation: int | None = None) -> Server:
        """The server of the conversation, or of the prompt's other answers, or with the fewest requests; once it takes
        another."""
        own = None if conversation is None else self.server_of_conversation.get(conversation)
        server = await self.wait_for_server(prompt, own)
        if conversation is not None:
            self.server_of_conversation[conversation] = server
        return server

    async def wait_for_server(self, prompt: Prompt, own: Server | None) -> Server:
        request = QueuedRequest(prompt, asyncio.get_running_loop().create_future())
        self.unfinished[prompt] += 1
        known = self.server_of.get(prompt)
        if own is not None and self.is_usable(own):
            own.queue.append(request)
        elif known is not None and self.is_usable(known) and known.load < self.max_requests:
            known.queue.append(request)
        else:
            self.waiting.setdefault(prompt, deque()).append(request)
        self.assign()
        try:
            return await request.server
        except BaseException:
            if request.server.done() and not request.server.cancelled() and request.server.exception() is None:
                request.server.result().unfinished -= 1  # cancelled after it was assigned
                self.assign()
            self.forget(prompt)
            raise

    def assign(self) -> None:
        """Waiting requests to servers that have less than their number."""
        while True:
            free = [
                server
                for server in self.servers
                if self.is_usable(server) and server.unfinished < self.max_requests and (server.queue or self.waiting)
            ]
            if not free:
                return
            server = min(free, key=lambda server: server.load)
            if not server.queue:
                self.take_prompt(server)
            request = server.queue.popleft()
            if not request.server.done():  # cancelled
                server.unfinished += 1
                request.server.set_result(server)

    def take_prompt(self, server: Server) -> None:
        """The requests of the next prompt; if they are more than a server takes, others get the rest."""
        prompt, requests = next(iter(self.waiting.items()))
        for _ in range(min(len(requests), self.max_requests)):
            server.queue.append(requests.popleft())
        if not requests:
            del self.waiting[prompt]
        self.server_of[prompt] = server

    def release(self, server: Server, prompt: Prompt) -> None:
        server.unfinished -= 1
        self.forget(prompt)
        self.assign()

    def forget(self, prompt: Prompt) -> None:
        self.unfinished[prompt] -= 1
        if not self.unfinished[prompt]:
            del self.unfinished[prompt]
            self.server_of.pop(prompt, None)

    def take_back(self, server: Server) -> None:
        """From a server that failed."""
        for request in server.queue:
            self.waiting.setdefault(request.prompt, deque()).append(request)
        server.queue.clear()

    def refuse(self, error: Callable[[], Exception]) -> None:
        """All requests that wait."""
        requests = [request for group in self.waiting.values() for request in group]
        self.waiting.clear()
        for request in requests:
            if not request.server.done():
                request.server.set_exception(error())
