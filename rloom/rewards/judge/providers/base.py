"""A provider: one request to a language model, through the provider's own SDK."""

import email.utils
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from rloom.rewards.judge.secret import Secret

RETRIED_STATUS = (408, 409, 429)  # and 500 or above


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
    input_tokens: int
    output_tokens: int
    cut_off: bool = False  # at max_tokens


class CallFailed(Exception):
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
        """CallFailed: no answer."""

    async def close(self) -> None: ...


def status_failure(status: int, message: str, headers: Mapping[str, str]) -> CallFailed:
    return CallFailed(
        f"HTTP {status}: {' '.join(message.split())}",
        retryable=status in RETRIED_STATUS or status >= 500,
        status=status,
        retry_after_s=retry_after(headers),
    )


def message_in(body: object, otherwise: str) -> str:
    """The message of an error's body, which may have it within `error`."""
    if isinstance(body, dict):
        inner = body.get("error")
        found = inner.get("message") if isinstance(inner, dict) else body.get("message")
        return str(found) if found else otherwise
    return otherwise


def connection_failure(error: BaseException) -> CallFailed:
    """Refused, reset, cut off in the middle, or not an answer of this API."""
    cause = error.__cause__ or error
    return CallFailed(f"connection failed: {type(cause).__name__}: {cause}", retryable=True)


def unusable(what: str) -> CallFailed:
    return CallFailed(f"the answer of the API is not usable: {what}", retryable=True)


def refused(why: str) -> CallFailed:
    return CallFailed(f"the model refused: {why}", retryable=False)


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds to wait, from the header Retry-After: a number of seconds or a date."""
    value = headers.get("retry-after") or headers.get("Retry-After")
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
