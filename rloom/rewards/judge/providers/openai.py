"""OpenAI, and every server with the same API: vLLM, SGLang, llama.cpp."""

from typing import Any

import openai

from rloom.rewards.judge.providers.base import (
    ChatRequest,
    Endpoint,
    JudgeCallFailed,
    Reply,
    connection_failure,
    field_of,
    first_of,
    message_in,
    refused,
    status_failure,
    text_in,
    token_count,
)

OWN_ADDRESS = "https://api.openai.com/v1"
NO_KEY = "none"  # the SDK requires one; a local server does not


class OpenAIProvider:
    def __init__(self, endpoint: Endpoint) -> None:
        self._client = openai.AsyncOpenAI(
            api_key=endpoint.key.reveal() if endpoint.key else NO_KEY,
            base_url=endpoint.base_url,
            timeout=endpoint.timeout_s,
            max_retries=0,
        )
        # reasoning models refuse the old name of this limit, and other servers may not have the new one
        self._limit = "max_completion_tokens" if endpoint.base_url == OWN_ADDRESS else "max_tokens"

    async def complete(self, request: ChatRequest) -> Reply:
        try:
            answer = await self._client.chat.completions.create(**self._body(request))
        except openai.APIStatusError as error:
            raise failure(error) from error
        except openai.APIConnectionError as error:
            raise connection_failure(error) from error
        return reply(answer)

    async def close(self) -> None:
        await self._client.close()

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": request.model,
            "messages": [
                {"role": "system", "content": request.system},
                {"role": "user", "content": request.user},
            ],
            self._limit: request.max_tokens,
        }
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if request.schema is not None:
            form = {"name": "verdict", "strict": True, "schema": request.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body


def failure(error: openai.APIStatusError) -> JudgeCallFailed:
    found = status_failure(error.status_code, message_in(error.body, error.message), error.response.headers)
    if error.code == "insufficient_quota":  # a 429 that does not end by waiting
        return JudgeCallFailed(found.reason, retryable=False, status=found.status)
    return found


def reply(answer: Any) -> Reply:
    choice, usage = first_of(field_of(answer, "choices"), "choices"), field_of(answer, "usage")
    message, finish_reason = field_of(choice, "message"), field_of(choice, "finish_reason")
    if refusal := field_of(message, "refusal"):
        raise refused(str(refusal))
    if finish_reason == "content_filter":
        raise refused("content filter")
    return Reply(
        text=text_in(field_of(message, "content")),
        input_tokens=token_count(field_of(usage, "prompt_tokens")),
        output_tokens=token_count(field_of(usage, "completion_tokens")),
        cut_off=finish_reason == "length",
    )
