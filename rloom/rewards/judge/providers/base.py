"""A provider: one request to a language model, through the provider's own SDK."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rloom.net.retry import retry_after_s
from rloom.rewards.judge.secret import Secret

RETRIED_STATUS = (408, 409, 429)  # and 500 or above
MOST_TOKENS = 100_000_000  # of one call; a larger count is a fault of the server


@dataclass(frozen=True)
class Endpoint:
    """Where and how an SDK client connects. It makes no retries: the judge has one policy for all providers."""

    base_url: str
    key: Secret | None
    timeout_s: float  # the judge limits each attempt to less
    connections: int


@dataclass(frozen=True)
class ChatRequest:
    model: str
    system: str
    user: str
    temperature: float | None  # None: not sent
    max_tokens: int
    schema: Mapping[str, Any] | None  # JSON schema of the answer; None: plain text


@dataclass(frozen=True)
class Reply:
    text: str
    input_tokens: int | None  # None: the server did not count them
    output_tokens: int | None
    cut_off: bool = False  # at max_tokens
    is_estimated: bool = False  # a count of tokens that the server did not send


class JudgeCallFailed(Exception):
    """An attempt without an answer, and why."""

    def __init__(
        self, reason: str, *, retryable: bool, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable
        self.status = status
        self.retry_after_s = retry_after_s


class Provider(Protocol):
    """Belongs to the event loop in which it was made."""

    async def complete(self, request: ChatRequest) -> Reply:
        """CallFailed: no answer. Another exception: an answer that is not JSON, or that the SDK cannot read."""

    async def close(self) -> None: ...


def status_failure(status: int, message: object, headers: Mapping[str, str] | None) -> JudgeCallFailed:
    return JudgeCallFailed(
        f"HTTP {status}: {message}",
        retryable=status in RETRIED_STATUS or status >= 500,
        status=status,
        retry_after_s=retry_after_s(headers),
    )


def message_in(body: object, otherwise: str) -> str:
    """The message of an error's body, which may have it within `error`."""
    if isinstance(body, dict):
        inner = body.get("error")
        found = inner.get("message") if isinstance(inner, dict) else body.get("message")
        return str(found) if found else otherwise
    return otherwise


def connection_failure(error: BaseException) -> JudgeCallFailed:
    """Refused, reset, or cut off in the middle."""
    cause = error.__cause__ or error
    return JudgeCallFailed(f"connection failed: {type(cause).__name__}: {cause}", retryable=True)


def unusable(what: str) -> JudgeCallFailed:
    return JudgeCallFailed(f"the answer of the API is not usable: {what}", retryable=True)


def refused(why: str) -> JudgeCallFailed:
    return JudgeCallFailed(f"the model refused: {why}", retryable=False)


def text_in(content: Any) -> str:
    """The text of a message: a string, or the text parts of a list, as some servers send it. Other parts, such as those
    of a model's thinking, do not count."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise unusable(f"its content is of type {type(content).__name__}")
    return "".join(text_in_part(part) for part in content)


def text_in_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind, text = field_of(part, "type"), field_of(part, "text")
    if kind not in (None, "text", "output_text"):
        return ""
    if not isinstance(text, str):
        raise unusable(f"a part of its content has a text of type {type(text).__name__}")
    return text


def field_of(value: Any, name: str) -> Any:
    """A field of an SDK's object or of a dict: the SDKs do not check the types of what a server sends. None: no such
    field."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def first_of(values: Any, what: str) -> Any:
    if not isinstance(values, list) or not values or values[0] is None:
        raise unusable(f"it has no {what}")
    return values[0]


def token_count(*values: Any) -> int | None:
    """The sum of the counts that a server sent. None: it sent none that can be right, and it has to be estimated."""
    counts = [value for value in values if value is not None]
    numbers = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
    return sum(counts) if numbers and 0 < sum(counts) <= MOST_TOKENS else None
