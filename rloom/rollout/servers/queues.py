"""Which server gets a request, and when: each has a bounded number of requests at a time, and others wait here.

The answers to one prompt go to one server, which computes the prompt's keys once. A request costs as much work here
however many wait. All methods are called in the event loop.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rloom.rollout.servers.http import Lifeline
from rloom.rollout.servers.launch import ServerProcess
from rloom.rollout.servers.wire import Sender

Prompt = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Place:
    """A request that waits for a server."""

    prompt: Prompt
    server: "asyncio.Future[Server]"


@dataclass(eq=False)
class Server:
    url: str
    process: ServerProcess | None = None  # None: a server of the user's
    is_local: bool = False  # on this machine: it is sent handles of the trainer's memory
    is_up: bool = False
    is_gone: bool = False  # not used again
    version: int | None = None  # of its weights; None: not those of the trainer
    label: str | None = None  # of the update that it got last; None with `version`
    instance: str | None = None  # of its process, where the engine has a route for it
    lifeline: Lifeline | None = None  # where the server of the user's tells one process from another in no other way
    asleep: set[str] = field(default_factory=set)  # parts of its memory that are released
    unfinished: int = 0  # requests that it has
    queue: deque[Place] = field(default_factory=deque)  # requests for it, beyond those
    failures: int = 0  # of health checks in a row
    restarts: int = 0
    fruitless: int = 0  # failures since its last answer
    reason: str = "has not answered yet"
    sender: Sender | None = None
    sends: "set[asyncio.Task[bytes]]" = field(default_factory=set)  # requests without an answer yet
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
        self.waiting: dict[Prompt, deque[Place]] = {}  # requests without a server, by prompt, in the order of arrival
        self.server_of: dict[Prompt, Server] = {}
        self.unfinished: Counter[Prompt] = Counter()

    async def acquire(self, prompt: Prompt) -> Server:
        """The server of the prompt's other answers, or the one with the fewest requests, once it takes another."""
        place = Place(prompt, asyncio.get_running_loop().create_future())
        self.unfinished[prompt] += 1
        known = self.server_of.get(prompt)
        if known is not None and self.is_usable(known) and known.load < self.max_requests:
            known.queue.append(place)
        else:
            self.waiting.setdefault(prompt, deque()).append(place)
        self.assign()
        try:
            return await place.server
        except BaseException:
            if place.server.done() and not place.server.cancelled() and place.server.exception() is None:
                place.server.result().unfinished -= 1  # cancelled after it was assigned
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
            place = server.queue.popleft()
            if not place.server.done():  # cancelled
                server.unfinished += 1
                place.server.set_result(server)

    def take_prompt(self, server: Server) -> None:
        """The requests of the next prompt; if they are more than a server takes, others get the rest."""
        prompt, places = next(iter(self.waiting.items()))
        for _ in range(min(len(places), self.max_requests)):
            server.queue.append(places.popleft())
        if not places:
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
        for place in server.queue:
            self.waiting.setdefault(place.prompt, deque()).append(place)
        server.queue.clear()

    def refuse(self, error: Callable[[], Exception]) -> None:
        """All requests that wait."""
        places = [place for group in self.waiting.values() for place in group]
        self.waiting.clear()
        for place in places:
            if not place.server.done():
                place.server.set_exception(error())
