"""What the three APIs have in common: the request as the session takes it, and typed fields of a JSON body."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rloom.episodes.base import ToolSchema
from rloom.episodes.session import AgentAnswer, AgentSession
from rloom.episodes.writer import Texts
from rloom.rollout.base import Sampling
from rloom.types import Message

Body = Mapping[str, Any]
Event = tuple[str | None, Mapping[str, Any] | str]  # (name, data) of a server-sent event
IMAGES = "the policy reads text only; send the content as text"
CONSTRAINED = "answers are sampled from the policy alone"
# fields with no effect on the tokens of an answer
WITHOUT_EFFECT = {
    *("metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("cache_control", "stream_options", "truncation", "container", "context_management", "betas"),
}


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", field: str | None = None):
        super().__init__(message if field is None else f"{field}: {message}")
        self.status, self.code, self.field = status, code, field


@dataclass(frozen=True)
class Asked:
    """A request for answers, of any API."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    count: int = 1  # answers
    stops: tuple[str, ...] = ()
    reads_calls: bool = True
    streams: bool = False
    with_logprobs: bool = False
    with_tokens: bool = False  # the answer has the ids of its tokens and of the prompt's
    is_instructed: bool = False  # the first message belongs to this request alone
    ignored: tuple[str, ...] = ()  # fields that would change the sampling or the prompt, and do not
    body: Body = field(default_factory=dict)


class Dialect(Protocol):
    """One API: its requests, answers and errors."""

    def read(self, body: Body, session: AgentSession) -> Asked:
        """Refused: a field is wrong, or asks for what cannot be done."""

    def answer(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> dict[str, Any]: ...

    def events(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> Iterator[Event]:
        """The answer as a stream."""

    def error(self, refused: Refused) -> dict[str, Any]: ...


class Fields:
    """The fields of a body. What has been read is remembered, so that the rest can be named."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.read: set[str] = set()

    def get(self, name: str) -> Any:
        self.read.add(name)
        return self.body.get(name)

    def text(self, name: str, default: str = "") -> str:
        value = self.get(name)
        return default if value is None else as_text(value, name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise Refused(f"{shown(value)}; it must be true or false", field=name)
        return bool(value)

    def positive(self, name: str, most: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refused(f"{shown(value)}; it must be a whole number from 1 on", field=name)
        if most is not None and value > most:
            raise Refused(f"{value}; the most is {most}", field=name)
        return value

    def items(self, name: str) -> list[Any]:
        value = self.get(name)
        return [] if value is None else as_list(value, name)

    def stops(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        found = [value] if isinstance(value, str) else [] if value is None else as_list(value, name)
        stops = tuple(as_text(one, f"{name}[{place}]") for place, one in enumerate(found))
        if len(stops) > 16 or not all(stops):
            raise Refused("at most 16 texts, none of them empty", field=name)
        return stops

    def ignored(self, sampling: Sampling) -> tuple[str, ...]:
        """Fields that nothing read and whose values are not those of the run."""
        own = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        left = self.body.keys() - self.read - WITHOUT_EFFECT
        return tuple(
            sorted(name for name in left if not is_empty(self.body[name]) and self.body[name] != own.get(name))
        )


def is_empty(value: Any) -> bool:
    return value is None or value is False or value in (0, [], {}, "")


def as_text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{shown(value)}; it must be a text", field=field)
    return value


def as_list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise Refused(f"{shown(value)}; it must be a list", field=field)
    return value


def as_mapping(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{shown(value)}; it must be an object", field=field)
    return value


def one_of(value: Any, allowed: Collection[str], field: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise Refused(f"{shown(value)}; it must be one of {', '.join(sorted(allowed))}", field=field)
    return value


def shown(value: Any) -> str:
    """A value in a message to the agent."""
    return (
        repr(value) if isinstance(value, bool | int | float | None) else f"{type(value).__name__} {str(value)[:40]!r}"
    )


def content_text(content: Any, field: str, kinds: Collection[str]) -> str:
    """A content is a text, or a list of parts of these kinds, each with a text."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(as_list(content, field)):
        where = f"{field}[{place}]"
        kind = as_mapping(part, where).get("type")
        if kind not in kinds:
            raise Refused(f"a part of type {shown(kind)}; {IMAGES}", field=where, code="unsupported_content")
        texts.append(as_text(part.get("refusal" if kind == "refusal" else "text"), f"{where}.text"))
    return "".join(texts)


def function_schema(tool: Mapping[str, Any], parameters: str, field: str) -> ToolSchema:
    """The form that chat templates take. `parameters`: the name of that field."""
    name = as_text(tool.get("name"), f"{field}.name")
    description = tool.get("description")
    schema = tool.get(parameters)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "" if description is None else as_text(description, f"{field}.description"),
            "parameters": {"type": "object", "properties": {}}
            if schema is None
            else as_mapping(schema, f"{field}.{parameters}"),
        },
    }


def called(name: Any, arguments: Any, id: Any, field: str) -> dict[str, Any]:
    """A call of a history. Templates take the arguments as an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}  # what an agent made of a wrong call
    return {
        "id": as_text(id, f"{field}.id"),
        "type": "function",
        "function": {"name": as_text(name, f"{field}.name"), "arguments": arguments},
    }


def with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Results of tools with the names of their tools, which some templates write."""
    names: dict[Any, str] = {}
    found: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id"))
        found.append({**message, "name": name} if message["role"] == "tool" and name else message)
    if not found:
        raise Refused("there is no message", field="messages")
    return tuple(found)


def refuse_constrained(value: Any, allowed: Collection[Any], field: str, way_out: str) -> None:
    if value not in allowed:
        raise Refused(f"{shown(value)}; {CONSTRAINED}. {way_out}", field=field, code="unsupported_parameter")


@dataclass(frozen=True)
class Parts:
    """An answer, taken apart."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, str, str], ...]  # (id, name, arguments as JSON)
    tokens: int

    @classmethod
    def of(cls, answer: AgentAnswer) -> "Parts":
        message = answer.message
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        return cls(
            message.get("reasoning_content", ""),
            message["content"],
            tuple((id, function["name"], function["arguments"]) for id, function in calls),
            len(answer.node.tokens_L),
        )


def token_logprobs(answer: AgentAnswer, texts: Texts) -> list[dict[str, Any]]:
    """The recorded log-probs. A token that is a part of a character has no bytes here."""
    node = answer.node
    assert node.logprobs_L is not None
    found = []
    for token, logprob in zip(node.tokens_L.tolist(), node.logprobs_L.tolist(), strict=True):
        text = texts.stop_texts.get(token) or texts.decode([token])
        written = None if "\ufffd" in text else list(text.encode())
        found.append({"token": text, "bytes": written, "logprob": logprob, "top_logprobs": []})
    return found
