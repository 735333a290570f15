"""Anthropic's Claude."""

import json
from typing import Any

import anthropic

from rloom.rewards.judge.providers.base import (
    ChatRequest,
    Endpoint,
    Reply,
    connection_failure,
    message_in,
    refused,
    status_failure,
    unusable,
)

TOOL = "submit_verdict"


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
        except (anthropic.APIConnectionError, ValueError) as error:  # ValueError: the body is not JSON
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
    if not isinstance(answer, anthropic.types.Message) or not isinstance(answer.content, list):
        raise unusable("it has no content")
    if answer.stop_reason == "refusal":
        raise refused("stop_reason=refusal")
    usage = answer.usage
    return Reply(
        text="".join(text_of(block) for block in answer.content),
        input_tokens=input_tokens(usage) if usage else 0,
        output_tokens=usage.output_tokens or 0 if usage else 0,
        cut_off=answer.stop_reason == "max_tokens",
    )


def text_of(block: Any) -> str:
    if block.type == "tool_use":
        return json.dumps(block.input, ensure_ascii=False)
    return block.text if block.type == "text" else ""


def input_tokens(usage: Any) -> int:
    """`input_tokens` leaves out those that were written to or read from the provider's prompt cache."""
    counts = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
    return sum(count or 0 for count in counts)
