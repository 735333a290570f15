"""A rollout engine whose requests are computed by servers."""

import asyncio
import logging
import queue
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from rloom.errors import ModelError
from rloom.net.http import Refused, Unreachable, allowed_connections
from rloom.net.loop import EventLoop
from rloom.rollout.base import UNKNOWN_VERSION, Begun, Completion, Request, Rollout
from rloom.rollout.servers.http import Http
from rloom.rollout.servers.launch import ServerProcess
from rloom.rollout.servers.queues import Server
from rloom.rollout.servers.watch import KEY, WatchedServers, WatchSettings
from rloom.rollout.servers.wire import (
    CACHE,
    WEIGHTS,
    Bucket,
    Call,
    ServerApi,
    ServerApiError,
    ServerCompletion,
    TransferSettings,
)

Weights = Iterator[tuple[str, Tensor]]
MOMENT_S = 0.01  # that poll waits for the first completion
BUCKET_BYTES = 512 << 20
FIRST_NOTICE_S = 60.0  # after so long without a completion, the log names the servers that are waited for
CONTROL_CONNECTIONS = 8  # of a server, beside those of requests: health, identity, weights, aborts
# For servers to answer interrupted requests with what they have. One that has not got the request yet ignores the call.
INTERRUPT_S, INTERRUPT_CALLS = 2.0, 4
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSpec:
    """A server of the user's, or one that rloom starts."""

    url: str
    process: ServerProcess | None
    transfer: TransferSettings


@dataclass(frozen=True)
class ClientSettings:
    watch: WatchSettings
    request_timeout_s: float  # from when it is sent to a server
    releases_memory: bool  # while training
    max_requests: int = 512  # that a server has at a time
    key: str | None = None  # of the servers' HTTP routes
    bucket_bytes: int = BUCKET_BYTES


class ServerRollout(Rollout):
    def __init__(
        self,
        specs: Sequence[ServerSpec],
        wire: ServerApi,
        settings: ClientSettings,
        convert: Callable[[Weights], Weights],  # to the names and shapes of a checkpoint
        source: Callable[[], Weights] | None = None,  # the actor's current weights, where this process has them all
    ) -> None:
        self.wire, self.settings, self.convert, self.source = wire, settings, convert, source
        self.transfers = {spec.url: spec.transfer for spec in specs}
        self.loop = EventLoop("rloom servers")
        self.http = Http(wire, settings.key, settings.request_timeout_s)
        servers = [Server(spec.url, spec.process) for spec in specs]
        max_requests = requests_per_server(len(servers), settings.max_requests)
        self.watched = WatchedServers(
            servers, self.http, settings.watch, resends=source is not None, max_requests=max_requests
        )
        self.run_name, self.ids, self.updates = uuid.uuid4().hex[:8], count(), count()
        self.progress_s, self.notice_s = time.monotonic(), FIRST_NOTICE_S  # time of the last completion, next notice
        self.tasks: dict[int, Future[None]] = {}  # unfinished requests
        self.server_of: dict[int, Server] = {}  # requests that are being generated
        self.begun: dict[int, Begun] = {}  # of unfinished requests
        self.interrupting: set[int] = set()  # requests that servers are asked for what they have
        self.done: queue.SimpleQueue[tuple[int, Completion | Exception]] = queue.SimpleQueue()
        self._finalizer = weakref.finalize(self, close, self.loop, self.watched, self.http)
        try:
            self.loop.run(self.watched.start())
        except BaseException:
            self._finalizer()
            raise

    def submit(self, request: Request) -> int:
        if not self.tasks:
            self.progress_s, self.notice_s = time.monotonic(), FIRST_NOTICE_S
        number = next(self.ids)
        if request.begun is not None:
            self.begun[number] = request.begun
        self.tasks[number] = self.loop.start(self.complete(number, request))
        return number

    async def complete(self, number: int, request: Request) -> None:
        """Until one server has finished it. After a failure the next server begins anew."""
        try:
            while (completion := await self.attempt(number, request)) is None:
                if number in self.interrupting:
                    return
            self.done.put((number, completion.behind(request.begun)))
        except Exception as error:
            self.done.put((number, error))

    async def attempt(self, number: int, request: Request) -> Completion | None:
        server = await self.watched.acquire(request.tokens, request.conversation)
        self.server_of[number] = server
        version, label = server.version, server.label
        try:
            if label is None or not await self.watched.confirm_after_idle(server, label):
                return None
            answer = await self.answer(server, self.wire.generate(request.without_begun, self.name_of(number)))
        finally:
            self.watched.queues.release(server, request.tokens)
            del self.server_of[number]
        if answer is None or (answer.aborted and number not in self.interrupting):
            return None
        if answer.label is not None and answer.label != label:
            if server.label == label:
                self.watched.failed(server, f"generated with weights {answer.label} in place of {label}")
            return None
        if not await self.watched.confirm(server, label):
            return None
        assert version is not None
        server.failures_since_answer = 0
        return Completion(
            number,
            torch.from_numpy(np.array(answer.tokens, dtype=np.int64)),
            torch.from_numpy(np.array(answer.logprobs, dtype=np.float32)),
            answer.finished,
            version,
            reused_tokens=answer.reused_tokens,
            interrupted=answer.aborted,
        )

    async def answer(self, server: Server, call: Call) -> ServerCompletion | None:
        """None: the server failed."""
        try:
            return self.wire.parse_completion(await self.watched.send(server, call))
        except Unreachable as failure:
            self.watched.failed(server, str(failure))
        except (Refused, ServerApiError) as failure:
            if isinstance(failure, ServerApiError) or failure.is_fault_of_the_request:
                raise ModelError(
                    f"the server {server.url} {failure}. The request would fail on others, too: check that the server "
                    "serves actor_rollout_ref.model.path with the arguments of docs/rollout.md"
                ) from failure
            self.watched.failed(server, str(failure))
        return None

    def name_of(self, number: int) -> str:
        """SGLang aborts all requests whose names begin with the one that is sent: no name begins with another."""
        return f"rloom-{self.run_name}-{number}."

    def poll(self) -> list[Completion]:
        if not self.tasks:
            return []
        self.send_again()
        completions = []
        for number, result in self.drain():
            if number not in self.tasks:  # cancelled
                continue
            if isinstance(result, Exception):
                self.abort()
                raise result
            self.forget_request(number)
            completions.append(result)
        if completions:
            self.progress_s, self.notice_s = time.monotonic(), FIRST_NOTICE_S
        elif (waited_s := time.monotonic() - self.progress_s) >= self.notice_s:
            self.notice_s *= 2
            log.info(f"Waiting for {self.waited_for()} ({waited_s:.0f} s without an answer)")
        return completions

    def forget_request(self, number: int) -> "Future[None]":
        self.begun.pop(number, None)
        return self.tasks.pop(number)

    def interrupt(self, request: int) -> Completion:
        [completion] = self.interrupt_all([request])
        return completion

    def interrupt_all(self, requests: Sequence[int]) -> list[Completion]:
        """Servers that have a route for it answer with what they have. Of others, and of one that fails meanwhile, a
        request keeps the tokens that it began with."""
        begun = {number: self.begun.get(number) for number in requests}
        version = UNKNOWN_VERSION if self.watched.version is None else self.watched.version
        self.loop.run(self.interrupt_tasks(requests))
        found, others = dict[int, Completion](), list[tuple[int, Completion | Exception]]()
        while not self.done.empty():
            number, result = self.done.get()
            if number not in begun:
                others.append((number, result))
            elif isinstance(result, Exception):
                self.abort()
                raise result
            else:
                found[number] = result
        for other in others:
            self.done.put(other)
        return [
            found.get(number) or Completion.without_tokens(number, version).behind(begun[number]) for number in requests
        ]

    async def interrupt_tasks(self, numbers: Sequence[int]) -> None:
        """Requests that no server has end at once: none may be sent to one now."""
        calls = {
            number: (server, call)
            for number in numbers
            if (server := self.server_of.get(number)) is not None
            and server.is_up
            and (call := self.wire.interrupt(self.name_of(number))) is not None
        }
        self.interrupting.update(calls)
        await self.cancel_all([number for number in numbers if number not in calls])
        for _ in range(INTERRUPT_CALLS):
            accepted = await asyncio.gather(*(self.is_accepted(server, call) for server, call in calls.values()))
            calls = {number: calls[number] for number, taken in zip(calls, accepted, strict=True) if taken}
            if calls:
                await asyncio.wait([asyncio.wrap_future(self.tasks[number]) for number in calls], timeout=INTERRUPT_S)
            calls = {number: call for number, call in calls.items() if not self.tasks[number].done()}
            if not calls:
                break
        await self.cancel_all([number for number in numbers if number in self.tasks])
        self.interrupting.clear()

    async def is_accepted(self, server: Server, call: Call) -> bool:
        """False: this version of the engine has no such route, or the server fails, which its other calls find."""
        try:
            await self.http.send(server.url, call)
        except (Unreachable, Refused):
            return False
        return True

    def waited_for(self) -> str:
        servers = [(server, server.unfinished) for server in self.watched.servers if server.unfinished]
        busy = [f"the server {server.url} ({number} requests)" for server, number in servers]
        return ", ".join(busy) or f"a server that can be used, with {len(self.tasks)} requests"

    def drain(self) -> list[tuple[int, Completion | Exception]]:
        try:
            found = [self.done.get(timeout=MOMENT_S)]
        except queue.Empty:
            return []
        while not self.done.empty():
            found.append(self.done.get())
        return found

    def end_conversation(self, conversation: int) -> None:
        self.loop.run(self.forget([conversation]))

    async def forget(self, conversations: Sequence[int]) -> None:
        for conversation in conversations:
            self.watched.queues.server_of_conversation.pop(conversation, None)

    def cancel(self, request: int) -> None:
        if request in self.tasks:
            self.loop.run(self.cancel_all([request]))

    def abort(self) -> None:
        """After an error: no request is left."""
        self.loop.run(self.cancel_all(list(self.tasks)))

    async def cancel_all(self, numbers: Sequence[int]) -> None:
        """Close the connections, at which servers abort the requests; SGLang is sent their names, too."""
        named = [(number, self.server_of[number]) for number in numbers if number in self.server_of]
        for number in numbers:
            self.forget_request(number).cancel()
        calls = [(server, self.wire.abort(self.name_of(number))) for number, server in named if server.is_up]
        await asyncio.gather(*(self.try_call(server, call) for server, call in calls if call is not None))

    def load_weights(self, weights: Weights, version: int) -> None:
        """The next token is computed with them. A server that fails meanwhile gets them when it is back."""
        assert not self.tasks
        self.loop.run(self.watched.refresh())
        self.watched.version = version
        self.send(weights, [server for server in self.watched.servers if server.is_up], version)
        usable = any(map(self.watched.is_usable, self.watched.servers))
        if not usable and self.source is None:
            raise self.watched.none_left()

    def send_again(self) -> None:
        """To servers that came back while requests wait or are generated elsewhere."""
        stale = self.watched.stale()
        if stale and self.source is not None:
            assert self.watched.version is not None
            self.send(self.source(), stale, self.watched.version)

    @torch.no_grad()
    def send(self, weights: Weights, servers: Sequence[Server], version: int) -> None:
        """Bucket by bucket, to all servers at the same time: the trainer never holds a second model."""
        label = f"rloom-{self.run_name}-{version}-{next(self.updates)}"  # never used twice: see WatchedServers.confirm
        self.resume(servers, WEIGHTS)
        receiving = [server for server in servers if server.is_up]
        with ThreadPoolExecutor(max(1, len(servers)), "weights") as threads:
            for bucket in buckets(self.convert(weights), self.settings.bucket_bytes):
                receiving = each(threads, receiving, partial(self.send_bucket, bucket, label))
            receiving = each(threads, receiving, partial(self.finish, label))
        self.loop.run(self.have_received(receiving, version, label))

    async def have_received(self, servers: Sequence[Server], version: int, label: str) -> None:
        for server in servers:
            if server.is_up:  # it may have failed since its last bucket
                server.version, server.label = version, label
        await asyncio.gather(*(self.watched.confirm(server, label) for server in servers))
        self.watched.notify()

    def send_bucket(self, bucket: Bucket, label: str, server: Server) -> bool:
        transfer = self.transfers[server.url]
        if server.sender is None:
            server.sender = self.wire.sender(ServerLink(self.loop, self.http, server.url), transfer)
        sender, tensors = server.sender, [(name, tensor.to(transfer.device).contiguous()) for name, tensor in bucket]
        return self.guarded(server, lambda: sender.send(tensors, label))

    def finish(self, label: str, server: Server) -> bool:
        sender = server.sender
        assert sender is not None
        return self.guarded(server, lambda: sender.finish(label))

    def guarded(self, server: Server, work: Callable[[], None]) -> bool:
        """Whether it succeeded. A server that does not accept the weights ends the run; one that fails does not."""
        try:
            work()
        except (ServerApiError, Refused) as error:
            raise ModelError(
                f"the server {server.url} {error}. {KEY}.weight_transfer sets how weights are sent; docs/rollout.md "
                "has the arguments that a server needs"
            ) from error
        except (Unreachable, RuntimeError) as error:  # RuntimeError: from the process group
            self.loop.run(self.fail(server, f"did not take the weights ({error})"))
            return False
        return True

    async def fail(self, server: Server, reason: str) -> None:
        self.watched.failed(server, reason)

    def sleep(self) -> None:
        self.loop.run(self.forget(list(self.watched.queues.server_of_conversation)))
        if self.settings.releases_memory:
            self.loop.run(self.release())

    async def release(self) -> None:
        awake = [server for server in self.watched.servers if server.is_up and not server.asleep]
        released = await asyncio.gather(*(self.try_call(server, self.wire.release()) for server in awake))
        for server, done in zip(awake, released, strict=True):
            if done:
                server.asleep = {WEIGHTS, CACHE}

    def wake(self) -> None:
        self.resume(self.watched.servers, WEIGHTS)
        self.resume(self.watched.servers, CACHE)

    def resume(self, servers: Sequence[Server], part: str) -> None:
        asleep = [server for server in servers if part in server.asleep]
        if asleep and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # what training has freed is still held by torch's allocator
        self.loop.run(self.resume_all(asleep, part))

    async def resume_all(self, servers: Sequence[Server], part: str) -> None:
        resumed = await asyncio.gather(*(self.try_call(server, self.wire.resume(part)) for server in servers))
        for server, done in zip(servers, resumed, strict=True):
            if done:
                server.asleep.discard(part)

    async def try_call(self, server: Server, call: Call) -> bool:
        try:
            await self.http.send(server.url, call)
        except (Unreachable, Refused) as failure:
            self.watched.failed(server, str(failure))
            return False
        return True

    def close(self) -> None:
        self.abort()
        self._finalizer()


@dataclass(frozen=True)
class ServerLink:
    loop: EventLoop
    http: Http
    url: str

    def start(self, call: Call) -> "Future[bytes]":
        return self.loop.start(self.http.send(self.url, call))


def close(loop: EventLoop, watched: WatchedServers, http: Http) -> None:
    loop.run(watched.close())
    loop.cancel_all()
    loop.run(http.close())
    for server in watched.servers:
        if server.process is not None:
            server.process.stop()
    loop.close()


def requests_per_server(servers: int, wanted: int) -> int:
    """As `wanted`, or fewer, so that there is a connection for each."""
    connections = allowed_connections(servers * (wanted + CONTROL_CONNECTIONS))
    found = max(1, min(wanted, connections // servers - CONTROL_CONNECTIONS))
    if found < wanted:
        log.info(
            f"Each server gets {found} requests at a time in place of {wanted}: `ulimit -n` allows no more "
            "connections. Raise its hard limit"
        )
    return found


def each(threads: ThreadPoolExecutor, servers: Sequence[Server], work: Callable[[Server], bool]) -> list[Server]:
    """The servers for which it succeeded."""
    return [server for server, ok in zip(servers, threads.map(work, servers), strict=True) if ok]


def buckets(weights: Weights, limit_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in weights:
        bucket.append((name, tensor))
        held += tensor.nbytes
        if held >= limit_bytes:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket
