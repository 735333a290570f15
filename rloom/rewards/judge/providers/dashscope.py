"""Alibaba Cloud's DashScope (Qwen), in its native protocol."""

from typing import Any

import dashscope
import httpx
from dashscope.v2 import errors

from rloom.rewards.judge.providers.base import (
    ChatRequest,
    Endpoint,
    JudgeCallFailed,
    Reply,
    connection_failure,
    field_of,
    first_of,
    status_failure,
    text_in,
    token_count,
)

HTTP_OK = 200
# Errors in the body of an answer with HTTP 200 have only a class.
CLASS_STATUS = {errors.RateLimitError: 429, errors.InternalServerError: 500, errors.ServiceUnavailableError: 503}


class DashScopeProvider:
    def __init__(self, endpoint: Endpoint) -> None:
        assert endpoint.key is not None  # checked at start
        self._key = endpoint.key
        limits = httpx.Limits(max_connections=endpoint.connections, max_keepalive_connections=endpoint.connections)
        self._http = httpx.AsyncClient(timeout=endpoint.timeout_s, limits=limits)
        self._client = dashscope.AsyncClient(
            api_key=self._key.reveal(),
            base_url=endpoint.base_url,
            protocol="native",
            max_retries=0,
            http_client=self._http,
        )

    async def complete(self, request: ChatRequest) -> Reply:
        try:
            answer = await self._client.chat.completions.create(
                model=request.model,
                messages=[
                    {"role": "system", "content": request.system},
                    {"role": "user", "content": request.user},
                ],
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                # it has no schemas; the prompt has the form
                response_format=None if request.schema is None else {"type": "json_object"},
                # the SDK adds them to a client of its own only
                api_key=self._key.reveal(),
                workspace=self._client.config.workspace,
            )
        except errors.APIStatusError as error:
            raise failure(error) from error
        except (errors.DashScopeError, httpx.HTTPError) as error:
            raise connection_failure(error) from error
        return reply(answer)

    async def close(self) -> None:
        await self._client.aclose()
        await self._http.aclose()


def failure(error: errors.APIStatusError) -> JudgeCallFailed:
    status = error.status_code or 0
    if status == HTTP_OK:
        status = next((code for kind, code in CLASS_STATUS.items() if isinstance(error, kind)), 400)
    message = f"{error.code}: {error.message}" if error.code else error.message
    return status_failure(status, message, error.headers)


def reply(answer: Any) -> Reply:
    choice, usage = first_of(field_of(answer, "choices"), "choices"), field_of(answer, "usage")
    return Reply(
        text=text_in(field_of(field_of(choice, "message"), "content")),
        input_tokens=token_count(field_of(usage, "input_tokens")),
        output_tokens=token_count(field_of(usage, "output_tokens")),
        cut_off=field_of(choice, "finish_reason") == "length",
    )
