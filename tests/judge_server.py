"""A local HTTP server that speaks the protocols of the providers, with faults by plan.

The score of an answer is in its text: `[worth 7]` gets a 7. The fault of a request depends on its number only.
"""

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any

from tests.streams import listening

KEY = "sk-test-4f9d2c7b1e8a6053"
INPUT_TOKENS, OUTPUT_TOKENS = 120, 20  # of every answer
WORTH = re.compile(r"\[worth (-?[\d.]+)\]")
MALFORMED = (
    "I would give it a 7 or an 8.",
    '{"reason": "fine", "score": 42}',
    '{"reason": "fine", "sco',
    "",
    "Score: between 3 and 4",
    "A nice answer.",
)
Plan = Callable[
    [int], str
]  # number of a request, from 1 -> "", or a status, "429 date", JSON, "hang", "malformed", "cut"
Body = dict[str, Any]


def no_faults(number: int) -> str:
    return ""


def faults_in_turn(*faults: str) -> Plan:
    """Of the first requests; none afterwards."""
    return lambda number: faults[number - 1] if number <= len(faults) else ""


def faults_by_share(shares: Mapping[str, float], seed: int = 0) -> Plan:
    def fault(number: int) -> str:
        draw = random.Random(seed * 1_000_003 + number).random()
        for name, share in shares.items():
            draw -= share
            if draw < 0:
                return name
        return ""

    return fault


@dataclass(frozen=True)
class Received:
    path: str
    headers: Mapping[str, str]
    body: Body


@dataclass
class JudgeServer:
    plan: Plan = no_faults
    latency_s: float = 0.0
    say: Callable[[Body, str], str] | None = None  # (body, user text) -> the words of the model
    refuses_response_format: bool = False
    retry_after: str = "0.01"
    key: str = KEY
    port: int = 0
    received: list[Received] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def base_url(self, provider: str) -> str:
        """As users know it: the compatible API of DashScope and Gemini has another path."""
        return self.root + {"openai": "/v1", "dashscope": "/api/v1"}.get(provider, "")

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await read_request(reader)) is not None:
                self.received.append(request)
                self.at_once += 1
                self.most_at_once = max(self.at_once, self.most_at_once)
                try:
                    keep = await self.answer(request, self.plan(len(self.received)), reader, writer)
                finally:
                    self.at_once -= 1
                if not keep:
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def answer(
        self, request: Received, fault: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """False: close the connection."""
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if fault == "hang":
            await reader.read(1)  # until the client leaves
            return False
        status, body = self.result(request, fault)
        headers = self.retry_headers(fault)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await write(writer, status, headers, data[: len(data) // 2] if fault == "cut" else data, len(data))
        return fault != "cut"

    def result(self, request: Received, fault: str) -> tuple[int, Body | bytes]:
        protocol = next((protocol for protocol in PROTOCOLS if protocol.path.fullmatch(request.path)), None)
        if protocol is None:
            return 404, {"message": f"no such path: {request.path}"}
        if (given := request.headers.get(protocol.key_header)) not in (self.key, f"Bearer {self.key}"):
            return 401, {"error": {"message": f"Incorrect API key: {given}"}}
        if fault[:3].isdigit():
            return int(fault[:3]), {"error": {"message": "not now"}, "message": "not now", "code": "Busy"}
        if fault.startswith("{"):
            return 200, json.loads(fault)
        if self.refuses_response_format and "response_format" in request.body:
            return 400, {"error": {"message": "response_format is not supported"}}
        _, user = protocol.texts(request.body)
        words = (
            MALFORMED[len(self.received) % len(MALFORMED)] if fault == "malformed" else self.words(request.body, user)
        )
        return 200, protocol.wrap(words)

    def retry_headers(self, fault: str) -> Mapping[str, str]:
        if fault == "429":
            return {"Retry-After": self.retry_after}
        if fault == "429 date":
            return {"Retry-After": formatdate(usegmt=True)}  # now
        return {}

    def words(self, body: Body, user: str) -> str:
        if self.say is not None:
            return self.say(body, user)
        scores = [float(worth) for worth in WORTH.findall(user)]
        if '"scores"' in user:
            entries = [{"answer": number, "score": score} for number, score in enumerate(scores, start=1)]
            return json.dumps({"reason": "compared", "scores": entries})
        return json.dumps({"reason": "as marked", "score": scores[0]})


@dataclass(frozen=True)
class Protocol:
    path: re.Pattern[str]
    key_header: str
    texts: Callable[[Body], tuple[str, str]]  # (system, user)
    wrap: Callable[[str], Body]  # the words of the model -> the answer of the API


def openai_texts(body: Body) -> tuple[str, str]:
    system, user = body["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    return system["content"], user["content"]


def openai_wrap(words: str) -> Body:
    message = {"role": "assistant", "content": words, "refusal": None}
    usage = {"prompt_tokens": INPUT_TOKENS, "completion_tokens": OUTPUT_TOKENS, "total_tokens": 140}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def claude_texts(body: Body) -> tuple[str, str]:
    [user] = body["messages"]
    return body["system"], user["content"]


def claude_wrap(words: str) -> Body:
    try:
        found = json.loads(words)
    except ValueError:
        block: Body = {"type": "text", "text": words}
    else:
        block = {"type": "tool_use", "id": "t", "name": "submit_verdict", "input": found}
    usage = {"input_tokens": INPUT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [block], "usage": usage}
    return message | {"stop_reason": "tool_use", "stop_sequence": None}


# the paths of the compatible APIs of OpenAI, Gemini and DashScope, beside which Anthropic has its own
PROTOCOLS = (
    Protocol(
        re.compile(r"(/v1|/v1beta/openai|/compatible-mode/v1)/chat/completions"),
        "authorization",
        openai_texts,
        openai_wrap,
    ),
    Protocol(re.compile(r"/v1/messages"), "x-api-key", claude_texts, claude_wrap),
)


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    line = (await reader.readline()).decode()
    if not line:
        return None
    headers: dict[str, str] = {}
    while (header := (await reader.readline()).decode().strip()) != "":
        name, _, value = header.partition(":")
        headers[name.lower()] = value.strip()
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(line.split()[1], headers, json.loads(data))


async def write(
    writer: asyncio.StreamWriter, status: int, headers: Mapping[str, str], data: bytes, announced: int
) -> None:
    lines = [f"HTTP/1.1 {status} status", "Content-Type: application/json", f"Content-Length: {announced}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    await writer.drain()


@contextmanager
def serving(kind: type[JudgeServer] = JudgeServer, **settings: Any) -> Iterator[JudgeServer]:
    """The server in a thread of its own."""
    server = kind(**settings)
    with listening(server.handle) as server.port:
        yield server
