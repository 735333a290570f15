"""Anthropic's Claude."""

import json
from typing import Any

import anthropic

from rloom.rewards.judge.providers.base import (
    ChatRequest,
    Endpoint,
    Reply,
    connection_failure,
    field_of,
    message_in,
    refused,
    status_failure,
    text_in,
    token_count,
    unusable,
)

TOOL = "submit_verdict"
# `input_tokens` leaves out those that were written to or read from the provider's prompt cache
INPUT_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


class ClaudeProvider:
    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.key is not None  # checked at start
        self._client = anthropic.AsyncAnthropic(
            api_key=endpoint.key.reveal(), base_url=endpoint.base_url, timeout=endpoint.timeout_s, max_retries=0
        )

    async def complete(self, request: ChatRequest) -> Reply:
        try:
            answer = await self._client.messages.create(**body(request))
        except anthropic.APIStatusError as error:
            message = message_in(error.body, error.message)
            raise status_failure(error.status_code, message, error.response.headers) from error
        except anthropic.APIConnectionError as error:
            raise connection_failure(error) from error
        return reply(answer)

    async def close(self) -> None:
        await self._client.close()


def body(request: ChatRequest) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": request.model,
        "system": request.system,
        "messages": [{"role": "user", "content": request.user}],
        "max_tokens": request.max_tokens,
    }
    if request.temperature is not None:  # the SDK has no argument for it since newer models refuse it
        found["extra_body"] = {"temperature": request.temperature}
    if request.schema is not None:  # older models have tools, and no other structured output
        tool = {"name": TOOL, "description": "Submit the verdict.", "input_schema": request.schema}
        found |= {"tools": [tool], "tool_choice": {"type": "tool", "name": TOOL}}
    return found


def reply(answer: Any) -> Reply:
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
    except (TypeError, RecursionError) as error:
        raise unusable(f"the input of its tool is not JSON: {type(error).__name__}") from error
