"""The policy behind a URL: the APIs of OpenAI and Anthropic, over HTTP on this machine, for the agents of running
episodes.

| request | |
| --- | --- |
| POST /v1/chat/completions | OpenAI's Chat Completions |
| POST /v1/responses | OpenAI's Responses |
| POST /v1/messages, /v1/messages/count_tokens | Anthropic's Messages |
| GET /v1/models, /v1/models/NAME | the policy, under any name |
| POST /rl/set_reward | {"reward": 1.0}, of the episode; {"reward": 1.0, "id": ...}, of one answer |

Each also below /sessions/ID. A request names its episode by this path or by the session's key (`Authorization: Bearer`
or `x-api-key`). Both are 128 random bits: other users of the machine and web pages in a browser can reach the port, and
know neither. /rl/set_reward takes the session's reward key alone, which is in no environment variable: programs that
the policy wrote can inherit the other key.
"""

import asyncio
import errno
import json
import logging
import re
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rloom.episodes.agents.process import number
from rloom.episodes.gateway.chat import ChatDialect
from rloom.episodes.gateway.fields import Asked, Body, Dialect, Event, RefusedRequest, as_text, shown
from rloom.episodes.gateway.messages import MessagesDialect
from rloom.episodes.gateway.responses import ResponsesDialect
from rloom.episodes.kinds import AGENT
from rloom.episodes.record import Ending
from rloom.episodes.runner import LimitReached
from rloom.episodes.session import IGNORED, OVER_HTTP, REFUSED, AgentAnswer, AgentSession, EpisodeEnded, Sessions
from rloom.errors import ConfigError, DataError

HOST = "127.0.0.1"
MOST_BYTES = 32 * 2**20  # of a body
MOST_DEPTH = 64  # of its JSON
HEAD_S = 10.0  # in which a new connection has to send the head of a request
BURST_S = 1.0  # a connection that is younger is not closed for a new one
BODY_S = 60.0  # to receive a body
IDLE_S = 600.0  # an unused connection is kept open: agents wait for their tools between requests
MOST_SILENT = 1024  # connections without a request, and at most a quarter of the process's descriptors
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PATH = re.compile(r"(?:/sessions/(?P<id>[^/]+))?(?:/v1)*(?P<rest>/.*)")
MODEL = "rloom"
DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatDialect(),
    "/responses": ResponsesDialect(),
    "/messages": MessagesDialect(),
}
COUNT_TOKENS, MODELS, SET_REWARD = "/messages/count_tokens", "/models", "/rl/set_reward"
NO_SESSION = (
    "the request names no running episode; send it to the address that the agent was given (.../sessions/ID/v1), or "
    "with the session's key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
)
NO_REWARD_KEY = (
    "rewards need the session's reward key as `Authorization: Bearer KEY`: a function gets it as its argument "
    "`reward_key`, a program in the row with actor_rollout_ref.rollout.agent.rewards_over_http=True"
)

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Scope = MutableMapping[str, Any]
log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The connection was closed before the answer."""


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str  # without the session and the version
    session_id: str | None
    headers: Mapping[str, str]
    receive: Receive

    @classmethod
    def of(cls, scope: Scope, receive: Receive) -> "HttpRequest":
        found = PATH.fullmatch(scope["path"])
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, id = (found["rest"], found["id"]) if found else (scope["path"], None)
        return cls(scope["method"], path.rstrip("/"), id, headers, receive)

    @property
    def key(self) -> str | None:
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else self.headers.get("x-api-key")

    @property
    def dialect(self) -> Dialect:
        """Whose errors the client reads."""
        if "anthropic-version" in self.headers or self.path.startswith("/messages"):
            return DIALECTS["/messages"]
        return DIALECTS["/chat/completions"]

    async def body(self) -> Body:
        """The JSON object that was sent."""
        too_large = RefusedRequest(f"the body is larger than {MOST_BYTES} bytes", status=413, code="request_too_large")
        stated = self.headers.get("content-length", "0")
        if not stated.isdecimal() or int(stated[:20]) > MOST_BYTES:
            raise too_large
        whole = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    whole += message["body"]
                    if len(whole) > MOST_BYTES:
                        raise too_large
                    if not message["more_body"]:
                        return parse_body(bytes(whole))
        except TimeoutError:
            raise RefusedRequest(f"the body did not arrive within {BODY_S:g} s", status=408, code="timeout") from None

    async def disconnected(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


def parse_body(whole: bytes) -> Body:
    try:
        found = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise RefusedRequest(f"the body is {shown(found)}; it must be a JSON object", code="invalid_json")
    level: list[Any] = [found]
    for _ in range(MOST_DEPTH):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [inner for inner in level if isinstance(inner, dict | list)]
    if level:
        raise RefusedRequest(f"the body has more than {MOST_DEPTH} levels", code="invalid_json")
    if b"\\ud" in whole.lower():
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RefusedRequest(
                "the body has a half of a surrogate pair, which is not text", code="invalid_json"
            ) from None
    return found


class GatewayConnection(H11Protocol):
    """A connection, which is closed if it does not send the head of a request soon. Any process of the machine can open
    one; a request without a session is refused, and its connection closed."""

    def __init__(self, silent: "dict[GatewayConnection, asyncio.TimerHandle]", **given: Any) -> None:
        super().__init__(**given)
        self.silent = silent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # negative: without a limit
        most = min(MOST_SILENT, descriptors // 4) if descriptors > 0 else MOST_SILENT
        for oldest in list(self.silent)[: max(len(self.silent) + 1 - most, 0)]:
            if self.silent[oldest].when() > self.loop.time() + HEAD_S - BURST_S:
                break  # asyncio accepts all that wait before it reads what one of them sent
            oldest.close()
        self.silent[self] = self.loop.call_later(HEAD_S, self.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:  # the head of a request was read
            self.not_silent()

    def close(self) -> None:
        self.not_silent()
        self.transport.abort()

    def not_silent(self) -> None:
        if (timer := self.silent.pop(self, None)) is not None:
            timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self.not_silent()
        super().connection_lost(exc)


class Gateway:
    """Serves the sessions of running episodes, in the event loop in which it is started."""

    def __init__(self) -> None:
        self.url = ""
        self.silent: dict[GatewayConnection, asyncio.TimerHandle] = {}  # connections without a request, oldest first
        self._said: set[str] = set()  # ignored fields and errors that the log names

    async def start(self, sessions: Sessions, port: int) -> None:
        """`port`: 0 for a free one."""
        self._sessions = sessions
        # asyncio sends without delay (TCP_NODELAY) where the protocol is named
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"{AGENT}.port={port}: {error.strerror}; use another, or 0 for a free one") from None
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http=partial(GatewayConnection, self.silent),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_S),
        )
        config.load()
        asyncio.get_running_loop().set_exception_handler(self._say_failed_accept)
        # startup without `serve`: no signal handlers, and no task that has to run all the time
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup([self._socket])

    def session_url(self, session: AgentSession) -> str:
        """ANTHROPIC_BASE_URL of its agent; OPENAI_BASE_URL is this and /v1."""
        return f"{self.url}/sessions/{session.id}"

    async def stop(self) -> None:
        """Closes all connections. Sessions have ended: there is nothing to wait for."""
        state = self._server.server_state
        for listener in self._server.servers:
            listener.close()
        tasks = list(state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(state.connections):
            connection.transport.abort()
        self._socket.close()
        await asyncio.sleep(0)  # connections are closed in the next turn of the loop

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest.of(scope, receive)
        session: AgentSession | None = None
        try:
            session = self._session(request)
            await self._answer(request, session, send)
        except ClientGone:
            return
        except Exception as error:
            refused = self._refusal(error)
            if session is not None:
                session.run.counts[REFUSED] += 1
            await send_json(send, request.dialect.error(refused), refused.status, close=session is None)

    def _session(self, request: HttpRequest) -> AgentSession:
        found = self._sessions.find(request.session_id, request.key)
        if found is not None:
            return found
        ending = self._sessions.ended.get(request.session_id or request.key or "")
        if ending is None:
            raise RefusedRequest(NO_SESSION, status=401, code="no_session")
        raise EpisodeEnded(ending)

    async def _answer(self, request: HttpRequest, session: AgentSession, send: Send) -> None:
        method, path = request.method, request.path
        if path == MODELS or path.startswith(f"{MODELS}/"):
            expect(method, "GET")
            name = path.removeprefix(MODELS).strip("/")
            return await send_json(send, model(name) if name else models())
        if path not in (*DIALECTS, COUNT_TOKENS, SET_REWARD):
            known = ", ".join(f"/v1{name}" for name in (*DIALECTS, COUNT_TOKENS, MODELS))
            raise RefusedRequest(
                f"no such path: {path[:80]!r}; there are {known}, {SET_REWARD}", status=404, code="not_found"
            )
        expect(method, "POST")
        body = await request.body()
        if path == SET_REWARD:
            return await send_json(send, set_reward(session, request.key, body))
        dialect = DIALECTS[path.removesuffix("/count_tokens")]
        asked = dialect.read(body, session)
        texts = session.run.writer.texts
        if path == COUNT_TOKENS:
            session.run.check_length(asked.messages)
            started = texts.template.start(asked.messages, asked.tools)
            return await send_json(send, {"input_tokens": len(started.tokens)})
        self._say_ignored(asked, session)
        answers = await ask(asked, request, session)
        if asked.streams:
            await send_events(send, dialect.events(asked, answers, texts))
        else:
            await send_json(send, dialect.answer(asked, answers, texts))

    def _refusal(self, error: Exception) -> RefusedRequest:
        found = refusal(error)
        if found is not None:
            return found
        kind = type(error).__name__
        if kind not in self._said:  # an agent can cause any number of them
            self._said.add(kind)
            log.warning(f"a request of an agent failed: {kind}: {error}")
        return RefusedRequest(f"rloom failed: {kind}: {error}", status=500, code="internal_error")

    def _say_failed_accept(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio reports each connection that it cannot accept, hundreds a second, with a traceback."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in NO_DESCRIPTORS:
            return loop.default_exception_handler(context)
        if "accept" not in self._said:
            self._said.add("accept")
            log.warning(
                f"a connection of an agent waits: {error.strerror}; raise `ulimit -n`, or lower "
                "actor_rollout_ref.rollout.multi_turn.max_environments"
            )

    def _say_ignored(self, asked: Asked, session: AgentSession) -> None:
        if not asked.ignored:
            return
        session.run.counts[IGNORED] += 1
        if new := set(asked.ignored) - self._said:
            self._said |= new
            log.warning(
                f"the agent sets {', '.join(sorted(new))}, which has no effect: answers are sampled as the keys of "
                "actor_rollout_ref.rollout say; agent/ignored_sampling counts such requests"
            )


async def ask(asked: Asked, request: HttpRequest, session: AgentSession) -> list[AgentAnswer]:
    """The answers. A client that goes away cancels them, and those that were generated are not trained."""
    answers: list[AgentAnswer] = []

    async def answer() -> None:
        answers.append(
            await session.chat(
                asked.messages, asked.tools, asked.max_tokens, stops=asked.stops, reads_calls=asked.reads_calls
            )
        )

    session.unsent.append(answers)
    work = [asyncio.ensure_future(answer()) for _ in range(asked.count)]
    gone = asyncio.ensure_future(request.disconnected())
    everything = asyncio.gather(*work, return_exceptions=True)
    try:
        await asyncio.wait((everything, gone), return_when=asyncio.FIRST_COMPLETED)
        is_gone = gone.done()
    finally:
        gone.cancel()
        for one in work:
            one.cancel()
        found = await everything
        if not session.closed:
            session.unsent = [one for one in session.unsent if one is not answers]
    if is_gone:
        if not session.closed:
            session.drop(answers)
        raise ClientGone
    session.check_open()
    if asked.is_instructed:
        session.instructed.update(answer.id for answer in answers)
    if answers:
        return sorted(answers, key=lambda one: one.node.request)
    assert isinstance(found[0], BaseException)
    raise found[0]


def refusal(error: Exception) -> RefusedRequest | None:
    """Why there is no answer, as the client reads it. None: an error of rloom."""
    if isinstance(error, RefusedRequest):
        return error
    if isinstance(error, LimitReached):
        if error.ending is Ending.TOKENS:
            limit = "prompt is too long: the episode has no tokens left (data.max_response_length)"
            return RefusedRequest(f"{limit}; shorten the history", code="context_length_exceeded")
        return RefusedRequest(
            f"the episode may have no further answer: {error.ending.value}", code="episode_limit_reached"
        )
    if isinstance(error, DataError):
        return RefusedRequest(str(error), field="messages")
    if isinstance(error, EpisodeEnded):
        return RefusedRequest(str(error), status=410, code="episode_ended")
    return None


def set_reward(session: AgentSession, key: str | None, body: Body) -> dict[str, Any]:
    if not secrets.compare_digest((key or "").encode(), session.reward_key.encode()):
        raise RefusedRequest(NO_REWARD_KEY, status=403, code="no_reward_key")
    reward, answer = body.get("reward"), body.get("id")
    try:
        if isinstance(reward, bool | str):
            raise TypeError
        value = number(reward)
    except (TypeError, ValueError, OverflowError):
        raise RefusedRequest(f"{shown(reward)[:80]}; it must be a finite number", field="reward") from None
    if answer is not None and as_text(answer, "id") not in session.nodes:
        raise RefusedRequest(
            f"{answer[:80]!r}; this session has no such answer", field="id", status=404, code="not_found"
        )
    session.set_reward(value, answer)
    session.run.counts[OVER_HTTP] += 1
    return {"reward": reward, "id": answer}


def expect(method: str, expected: str) -> None:
    if method != expected:
        raise RefusedRequest(f"{method}; this path takes {expected}", status=405, code="method_not_allowed")


def model(name: str) -> dict[str, Any]:
    """With the fields of both APIs."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "rloom"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def models() -> dict[str, Any]:
    return {"object": "list", "data": [model(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL}


async def send_json(send: Send, found: Mapping[str, Any], status: int = 200, *, close: bool = False) -> None:
    """`close`: the connection, too."""
    headers = [(b"content-type", b"application/json")]
    if close:
        headers.append((b"connection", b"close"))
    if status >= 400:
        headers.append((b"x-should-retry", b"false"))  # the SDKs would ask again
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(found).encode()})


async def send_events(send: Send, events: Iterable[Event]) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for name, data in events:
        line = data if isinstance(data, str) else json.dumps(data)
        written = f"data: {line}\n\n" if name is None else f"event: {name}\ndata: {line}\n\n"
        await send({"type": "http.response.body", "body": written.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})
