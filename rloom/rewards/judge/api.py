"""One call of a language model over HTTP, in one of two formats: OpenAI's chat completions, which DashScope, Gemini and
local servers take too, and Anthropic's messages."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rloom.net.http import HttpClient, Refused, RequestFailed, Unreachable, shortened
from rloom.rewards.judge.settings import PROVIDERS, Provider, Secret

LIBRARY_LOGGERS = ("httpx", "httpcore")  # below the level of errors they write addresses and headers of requests
RETRIED_STATUS = (408, 409, 429)  # and 500 or above
NOT_FOUND = 404
MOST_TOKENS = 100_000_000  # of one call; a larger count is a fault of the server
# In the newer version 2026-10-21 the API refuses every temperature.
ANTHROPIC_VERSION = "2023-06-01"
TOOL = "submit_verdict"
# `input_tokens` leaves out those that were written to or read from the provider's prompt cache
INPUT_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
# Words in the code of an error that DashScope sends with HTTP status 200, and the status that it means
CODE_STATUS = {"throttling": 429, "quota": 429, "internal": 500, "unavailable": 503}


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


class JudgeApi:
    """Calls of one provider. It repeats none: the judge has one policy for all. The caller limits their time."""

    def __init__(
        self, provider: str, base_url: str, key: Secret | None, headers: Mapping[str, str | None], connections: int
    ) -> None:
        for name in LIBRARY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._provider = PROVIDERS[provider]
        self._address = self._provider.called(base_url)
        self._is_mapped = self._address != base_url
        self._format = CHAT_COMPLETIONS if self._provider.has_chat_completions else MESSAGES
        sent = {name: value for name, value in headers.items() if value}
        if key is not None:
            sent |= self._format.headers(key.reveal())
        self._http = HttpClient(
            headers=sent,
            connections=connections,
            max_connections=connections,
            # at a redirect to another host, httpx removes the header Authorization, and not x-api-key
            follow_redirects=self._provider.has_chat_completions,
        )

    async def complete(self, request: ChatRequest) -> Reply:
        """JudgeCallFailed: no answer. Another exception: an answer that is not JSON."""
        body = json.dumps(self._format.body(request, self._provider, self._address), ensure_ascii=False).encode()
        try:
            data = await self._http.post(self._address + self._format.path, body)
        except Refused as error:
            raise self._refusal(error) from error
        except Unreachable as error:  # refused, reset, or cut off in the middle
            cause = error.__cause__ or error
            raise JudgeCallFailed(f"connection failed: {type(cause).__name__}: {cause}", retryable=True) from error
        except RequestFailed as error:
            raise JudgeCallFailed(f"the server {error}", retryable=True) from error
        answer = json.loads(data)
        check_for_error(answer)
        return self._format.reply(answer)

    async def close(self) -> None:
        await self._http.close()

    def _refusal(self, error: Refused) -> JudgeCallFailed:
        assert error.status is not None
        text = error.body.decode("utf-8", "replace")
        try:
            code, message = error_fields(json.loads(text))
        except (ValueError, RecursionError):
            code = message = None
        message = message or shortened(text) or "an empty body"
        if error.status == NOT_FOUND and self._is_mapped:
            message = f"{message} (called: {self._address}{self._format.path}, the OpenAI-compatible API)"
        found = status_failure(error.status, message, error.retry_after_s)
        if code == "insufficient_quota" and self._provider.ends_with_quota:
            found.retryable = False
        return found


def chat_body(request: ChatRequest, provider: Provider, address: str) -> dict[str, Any]:
    # OpenAI's reasoning models refuse the old name of this limit, and other servers may not have the new one
    limit = "max_completion_tokens" if address == PROVIDERS["openai"].base_url else "max_tokens"
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [{"role": "system", "content": request.system}, {"role": "user", "content": request.user}],
        limit: request.max_tokens,
    }
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.schema is not None and provider.has_schemas:
        schema = request.schema if provider.has_closed_schemas else without(request.schema, "additionalProperties")
        form = {"name": "verdict", "strict": True, "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    elif request.schema is not None:
        body["response_format"] = {"type": "json_object"}
    return body


def without(schema: Any, name: str) -> Any:
    """The schema without this keyword at any depth."""
    if isinstance(schema, Mapping):
        return {key: without(value, name) for key, value in schema.items() if key != name}
    return schema


def chat_reply(answer: Any) -> Reply:
    choice, usage = first_of(field_of(answer, "choices"), "choices"), field_of(answer, "usage")
    message, finish_reason = field_of(choice, "message"), field_of(choice, "finish_reason")
    if refusal := field_of(message, "refusal"):
        raise refused(str(refusal))
    if finish_reason == "content_filter":
        raise refused("content filter")
    read, written, total = (
        token_count(field_of(usage, name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if read and written and total:  # Gemini counts the tokens of its thinking in the total only
        written = max(written, total - read)
    return Reply(text_in(field_of(message, "content")), read, written, cut_off=finish_reason == "length")


def messages_body(request: ChatRequest, provider: Provider, address: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model,
        "system": request.system,
        "messages": [{"role": "user", "content": request.user}],
        "max_tokens": request.max_tokens,
    }
    if request.temperature is not None:
        body["temperature"] = request.temperature
    if request.schema is not None:  # older models have tools, and no other structured output
        tool = {"name": TOOL, "description": "Submit the verdict.", "input_schema": request.schema}
        body |= {"tools": [tool], "tool_choice": {"type": "tool", "name": TOOL}}
    return body


def messages_reply(answer: Any) -> Reply:
    content, usage, stop_reason = (field_of(answer, name) for name in ("content", "usage", "stop_reason"))
    if stop_reason == "refusal":
        raise refused("stop_reason=refusal")
    if not isinstance(content, list):
        raise unusable("it has no content")
    verdicts = [verdict_of(block) for block in content if field_of(block, "type") == "tool_use"]
    return Reply(
        text="\n".join(verdicts) or text_in(content),
        input_tokens=token_count(*(field_of(usage, name) for name in INPUT_COUNTS)),
        output_tokens=token_count(field_of(usage, "output_tokens")),
        cut_off=stop_reason == "max_tokens",
    )


def verdict_of(block: Any) -> str:
    try:
        return json.dumps(field_of(block, "input"), ensure_ascii=False)
    except RecursionError as error:
        raise unusable(f"the input of its tool is not JSON: {type(error).__name__}") from error


@dataclass(frozen=True)
class WireFormat:
    path: str  # after the base URL
    headers: Callable[[str], dict[str, str]]  # for a key
    body: Callable[[ChatRequest, Provider, str], dict[str, Any]]  # of a request to a provider at an address
    reply: Callable[[Any], Reply]  # from JSON


CHAT_COMPLETIONS = WireFormat(
    "/chat/completions", lambda key: {"Authorization": f"Bearer {key}"}, chat_body, chat_reply
)
MESSAGES = WireFormat(
    "/v1/messages",
    lambda key: {"x-api-key": key, "anthropic-version": ANTHROPIC_VERSION},
    messages_body,
    messages_reply,
)


def status_failure(status: int, message: object, retry_after_s: float | None = None) -> JudgeCallFailed:
    return JudgeCallFailed(
        f"HTTP {status}: {message}",
        retryable=status in RETRIED_STATUS or status >= 500,
        status=status,
        retry_after_s=retry_after_s,
    )


def check_for_error(answer: Any) -> None:
    """JudgeCallFailed: the answer is an error, although the HTTP status is a success."""
    code, message = error_fields(answer)
    if code is None or "choices" in answer:
        return
    means = (status for word, status in CODE_STATUS.items() if word in str(code).lower())
    status = code if isinstance(code, int) and 400 <= code < 600 else next(means, 400)
    raise status_failure(status, f"{code}: {message}")


def error_fields(body: Any) -> tuple[Any, Any]:
    """(code, message), which may be within `error`, and with Gemini within a list."""
    found = body[0] if isinstance(body, list) and body else body
    inner = field_of(found, "error")
    found = inner if isinstance(inner, dict) else found
    return field_of(found, "code"), field_of(found, "message")


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
    """None: it is no object, or has no such field. Servers do not keep to types."""
    return value.get(name) if isinstance(value, dict) else None


def first_of(values: Any, what: str) -> Any:
    if not isinstance(values, list) or not values or values[0] is None:
        raise unusable(f"it has no {what}")
    return values[0]


def token_count(*values: Any) -> int | None:
    """The sum of the counts that a server sent. None: it sent none that can be right, and it has to be estimated."""
    counts = [value for value in values if value is not None]
    numbers = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
    return sum(counts) if numbers and 0 < sum(counts) <= MOST_TOKENS else None
