"""OpenAI's Chat Completions: POST /v1/chat/completions."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rloom.episodes.gateway.fields import (
    Asked,
    Body,
    Event,
    Fields,
    Parts,
    Refused,
    as_list,
    as_mapping,
    as_text,
    called,
    content_text,
    function_schema,
    one_of,
    refuse_constrained,
    shown,
    token_logprobs,
    with_names,
)
from rloom.episodes.session import AgentAnswer, AgentSession
from rloom.episodes.writer import Texts
from rloom.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_ANSWERS = 128


class ChatDialect:
    def read(self, body: Body, session: AgentSession) -> Asked:
        fields = Fields(body)
        messages = [read_message(one, f"messages[{place}]") for place, one in enumerate(fields.items("messages"))]
        choice, form = fields.get("tool_choice"), fields.get("response_format")
        refuse_constrained(choice, (None, "auto", "none"), "tool_choice", "Use auto, and ask for the call in a message")
        kind = form.get("type") if isinstance(form, dict) else form
        refuse_constrained(kind, (None, "text"), "response_format", "Use text, and ask for JSON in a message")
        refuse_constrained(fields.get("logit_bias") or None, (None,), "logit_bias", "Leave it out")
        if fields.get("top_logprobs"):
            raise Refused("only the sampled token's is recorded; leave it out, or use 0", field="top_logprobs")
        for name in ("functions", "function_call"):
            if fields.get(name) is not None:
                raise Refused("use tools and tool_choice", field=name)
        limits = fields.positive("max_tokens"), fields.positive("max_completion_tokens")
        return Asked(
            model=fields.text("model", "rloom"),
            messages=with_names(messages),
            tools=tuple(read_tool(one, f"tools[{place}]") for place, one in enumerate(fields.items("tools"))),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            count=fields.positive("n", MOST_ANSWERS) or 1,
            stops=fields.stops("stop"),
            reads_calls=choice != "none",
            streams=fields.flag("stream"),
            with_logprobs=fields.flag("logprobs"),
            with_tokens=fields.flag("return_token_ids"),
            ignored=fields.ignored(session.run.sampling),
            body=body,
        )

    def answer(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {**answer.message, "content": answer.message["content"] or None, "refusal": None},
                **self.rest_of_choice(asked, answer, texts),
            }
            for index, answer in enumerate(answers)
        ]
        whole = {**head(asked, answers), "object": "chat.completion", "choices": choices, "usage": usage(answers)}
        return {**whole, "prompt_token_ids": list(answers[0].prompt)} if asked.with_tokens else whole

    def rest_of_choice(self, asked: Asked, answer: AgentAnswer, texts: Texts) -> dict[str, Any]:
        rest: dict[str, Any] = {"finish_reason": finish_reason(answer), "logprobs": None}
        if asked.with_logprobs:
            rest["logprobs"] = {"content": token_logprobs(answer, texts), "refusal": None}
        if asked.with_tokens:
            rest["token_ids"] = answer.node.tokens_L.tolist()
        return rest

    def events(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> Iterator[Event]:
        start = {**head(asked, answers), "object": "chat.completion.chunk"}
        for index, answer in enumerate(answers):
            for delta in deltas(answer):
                choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}
                yield None, {**start, "choices": [choice]}
            last = {"index": index, "delta": {}, **self.rest_of_choice(asked, answer, texts)}
            yield None, {**start, "choices": [last]}
        options = asked.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            yield None, {**start, "choices": [], "usage": usage(answers)}
        yield None, "[DONE]"

    def error(self, refused: Refused) -> dict[str, Any]:
        kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
        return {
            "error": {
                "message": str(refused),
                "type": kind if refused.status < 500 else "server_error",
                "param": refused.field,
                "code": refused.code,
            }
        }


def read_message(found: Any, field: str) -> Message:
    message = as_mapping(found, field)
    role = one_of(message.get("role"), ROLES, f"{field}.role")
    content = message.get("content")
    if content is None and role in ("assistant", "tool"):
        content = ""
    text = content_text(content, f"{field}.content", ("text", "refusal"))
    if role == "tool":
        return {
            "role": role,
            "content": text,
            "tool_call_id": as_text(message.get("tool_call_id"), f"{field}.tool_call_id"),
        }
    if role != "assistant":
        return {"role": "system" if role == "developer" else role, "content": text}
    answer: dict[str, Any] = {"role": role, "content": text}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        answer["reasoning_content"] = as_text(reasoning, f"{field}.reasoning_content")
    if message.get("tool_calls"):
        calls = as_list(message["tool_calls"], f"{field}.tool_calls")
        answer["tool_calls"] = [read_call(one, f"{field}.tool_calls[{place}]") for place, one in enumerate(calls)]
    return answer


def read_call(found: Any, field: str) -> dict[str, Any]:
    call = as_mapping(found, field)
    function = as_mapping(call.get("function"), f"{field}.function")
    return called(function.get("name"), function.get("arguments"), call.get("id"), field)


def read_tool(found: Any, field: str) -> Mapping[str, Any]:
    tool = as_mapping(found, field)
    if tool.get("type", "function") != "function":
        raise Refused(f"a tool of type {shown(tool['type'])}; use type function, and run it in the agent", field=field)
    return function_schema(as_mapping(tool.get("function"), f"{field}.function"), "parameters", f"{field}.function")


def head(asked: Asked, answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    return {"id": answers[0].id, "created": int(time.time()), "model": asked.model}


def usage(answers: Sequence[AgentAnswer]) -> dict[str, int]:
    prompt = len(answers[0].prompt)
    sampled = sum(len(answer.node.tokens_L) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finish_reason(answer: AgentAnswer) -> str:
    if not answer.node.finished:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def deltas(answer: AgentAnswer) -> Iterator[dict[str, Any]]:
    parts = Parts.of(answer)
    yield {"role": "assistant", "content": ""}
    if parts.reasoning:
        yield {"reasoning_content": parts.reasoning}
    if parts.text:
        yield {"content": parts.text}
    for index, (id, name, arguments) in enumerate(parts.calls):
        function = {"name": name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
