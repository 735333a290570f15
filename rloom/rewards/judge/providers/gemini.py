"""Google's Gemini."""

from collections.abc import Mapping
from typing import Any

import httpx
from google import genai
from google.genai import errors, types

from rloom.rewards.judge.providers.base import (
    ChatRequest,
    Endpoint,
    Reply,
    connection_failure,
    field_of,
    first_of,
    refused,
    status_failure,
    token_count,
)

BLOCKED = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE")


class GeminiProvider:
    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.key is not None  # checked at start
        limits = httpx.Limits(max_connections=endpoint.connections, max_keepalive_connections=endpoint.connections)
        self._http = httpx.AsyncClient(limits=limits)
        self._client = genai.Client(
            api_key=endpoint.key.reveal(),
            vertexai=False,  # an environment variable would choose the other service
            http_options=types.HttpOptions(
                base_url=endpoint.base_url,
                timeout=int(endpoint.timeout_s * 1000),
                retry_options=types.HttpRetryOptions(attempts=1),
                httpx_async_client=self._http,  # else it uses aiohttp, with a warning
            ),
        )

    async def complete(self, request: ChatRequest) -> Reply:
        try:
            answer = await self._client.aio.models.generate_content(
                model=request.model, contents=request.user, config=configuration(request)
            )
        except errors.APIError as error:
            headers = error.response.headers if error.response is not None else {}
            raise status_failure(error.code, str(error.message or error.status), headers) from error
        except httpx.HTTPError as error:
            raise connection_failure(error) from error
        return reply(answer)

    async def close(self) -> None:
        await self._client.aio.aclose()
        await self._http.aclose()
        self._client.close()


def configuration(request: ChatRequest) -> types.GenerateContentConfig:
    structured: dict[str, Any] = {}
    if request.schema is not None:
        structured = {"response_mime_type": "application/json", "response_schema": gemini_schema(request.schema)}
    return types.GenerateContentConfig(
        system_instruction=request.system,
        temperature=request.temperature,
        max_output_tokens=request.max_tokens,
        **structured,
    )


def gemini_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Gemini's subset of JSON schema: types in capitals, no `additionalProperties`, an explicit order."""
    found: dict[str, Any] = {"type": str(schema["type"]).upper()}
    if "properties" in schema:
        found["properties"] = {name: gemini_schema(part) for name, part in schema["properties"].items()}
        found["required"] = list(schema["required"])
        found["propertyOrdering"] = list(schema["properties"])
    if "items" in schema:
        found["items"] = gemini_schema(schema["items"])
    return found


def reply(answer: types.GenerateContentResponse) -> Reply:
    blocked = answer.prompt_feedback.block_reason if answer.prompt_feedback else None
    if blocked:
        raise refused(f"the prompt is blocked: {blocked.value}")
    candidate, usage = first_of(answer.candidates, "candidates"), answer.usage_metadata
    ended = candidate.finish_reason.value if candidate.finish_reason else ""
    if ended in BLOCKED:
        raise refused(f"finishReason={ended}")
    parts = candidate.content.parts if candidate.content and candidate.content.parts else []
    return Reply(
        text="".join(part.text or "" for part in parts if not part.thought),
        input_tokens=token_count(field_of(usage, "prompt_token_count")),
        output_tokens=token_count(field_of(usage, "candidates_token_count"), field_of(usage, "thoughts_token_count")),
        cut_off=ended == "MAX_TOKENS",
    )
