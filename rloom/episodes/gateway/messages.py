"""Anthropic's Messages: POST /v1/messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rloom.episodes.gateway.fields import (
    IMAGES,
    Asked,
    Body,
    Event,
    Fields,
    Parts,
    RefusedRequest,
    as_list,
    as_mapping,
    as_text,
    called,
    content_text,
    function_schema,
    one_of,
    refuse_constrained,
    shown,
    with_names,
)
from rloom.episodes.session import AgentAnswer, AgentSession
from rloom.episodes.writer import Texts
from rloom.types import Message

ERRORS = {401: "authentication_error", 404: "not_found_error", 410: "not_found_error", 413: "request_too_large"}
WAY_OUT = "Use auto, and ask for the call in a message"


class MessagesDialect:
    def read(self, body: Body, session: AgentSession) -> Asked:
        fields = Fields(body)
        system = fields.get("system")
        messages: list[Message] = []
        if system:
            messages.append({"role": "system", "content": content_text(system, "system", ("text",))})
        for place, one in enumerate(fields.items("messages")):
            messages += read_message(one, f"messages[{place}]")
        choice = fields.get("tool_choice")
        kind = "auto" if choice is None else as_mapping(choice, "tool_choice").get("type")
        refuse_constrained(kind, ("auto", "none"), "tool_choice.type", WAY_OUT)
        for name in ("output_config", "output_format"):
            form = fields.get(name)
            wants_form = form is not None and (name == "output_format" or as_mapping(form, name).get("format"))
            refuse_constrained(
                form if wants_form else None, (None,), name, "Leave it out, and ask for JSON in a message"
            )
        return Asked(
            model=fields.text("model", "rloom"),
            messages=with_names(messages),
            tools=tuple(read_tool(one, f"tools[{place}]") for place, one in enumerate(fields.items("tools"))),
            max_tokens=fields.positive("max_tokens"),
            stops=fields.stops("stop_sequences"),
            reads_calls=kind != "none",
            streams=fields.flag("stream"),
            ignored=fields.ignored(session.run.sampling),
            body=body,
        )

    def answer(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> dict[str, Any]:
        [answer] = answers
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": blocks(answer),
            **ending(answer),
            "usage": {"input_tokens": len(answer.prompt), "output_tokens": len(answer.node.tokens_L)},
        }

    def events(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> Iterator[Event]:
        whole = self.answer(asked, answers, texts)
        started = {
            **whole,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**whole["usage"], "output_tokens": 0},
        }
        yield event("message_start", message=started)
        for index, block in enumerate(whole["content"]):
            first, *deltas = block_deltas(block)
            yield event("content_block_start", index=index, content_block=first)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        yield event("message_delta", delta=ending(answers[0]), usage=whole["usage"])
        yield event("message_stop")

    def error(self, refused: RefusedRequest) -> dict[str, Any]:
        kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused), "code": refused.code}}


def event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def read_message(found: Any, field: str) -> Iterator[Message]:
    """A message; or several, where a user's has results of tools."""
    message = as_mapping(found, field)
    role = one_of(message.get("role"), ("user", "assistant", "system"), f"{field}.role")
    content = message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "assistant":
        yield read_answer(as_list(content, f"{field}.content"), f"{field}.content")
    else:
        texts: list[Any] = []
        for place, one in enumerate(as_list(content, f"{field}.content")):
            where = f"{field}.content[{place}]"
            block = as_mapping(one, where)
            if block.get("type") != "tool_result":
                texts.append(content_text([block], where, ("text",)))
                continue
            if texts:
                yield {"role": role, "content": "".join(texts)}
                texts = []
            yield {
                "role": "tool",
                "content": content_text(block.get("content") or "", f"{where}.content", ("text",)),
                "tool_call_id": as_text(block.get("tool_use_id"), f"{where}.tool_use_id"),
            }
        if texts or not content:
            yield {"role": role, "content": "".join(texts)}


def read_answer(content: Sequence[Any], field: str) -> Message:
    reasoning, texts, calls = "", list[str](), list[dict[str, Any]]()
    for place, one in enumerate(content):
        where = f"{field}[{place}]"
        block = as_mapping(one, where)
        kind = block.get("type")
        if kind == "thinking":
            reasoning += as_text(block.get("thinking"), f"{where}.thinking")
        elif kind == "text":
            texts.append(as_text(block.get("text"), f"{where}.text"))
        elif kind == "tool_use":
            calls.append(
                called(block.get("name"), as_mapping(block.get("input"), f"{where}.input"), block.get("id"), where)
            )
        elif kind != "redacted_thinking":
            raise RefusedRequest(f"a block of type {shown(kind)}; {IMAGES}", field=where, code="unsupported_content")
    answer: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        answer["reasoning_content"] = reasoning
    return {**answer, "tool_calls": calls} if calls else answer


def read_tool(found: Any, field: str) -> Mapping[str, Any]:
    tool = as_mapping(found, field)
    if tool.get("type") not in (None, "custom"):
        raise RefusedRequest(
            f"a tool of type {shown(tool['type'])}; use type custom, and run it in the agent", field=field
        )
    return function_schema(tool, "input_schema", field)


def blocks(answer: AgentAnswer) -> list[dict[str, Any]]:
    parts = Parts.of(answer)
    found: list[dict[str, Any]] = []
    if parts.reasoning:
        found.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.text or not parts.calls:
        found.append({"type": "text", "text": parts.text})
    for id, name, arguments in parts.calls:
        found.append({"type": "tool_use", "id": id, "name": name, "input": as_input(arguments)})
    return found


def as_input(arguments: str) -> Any:
    """What the policy wrote, even if it is no JSON: the tool refuses it, and the policy can correct it."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}


def block_deltas(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The empty block, then what is added to it."""
    if block["type"] == "thinking":
        added = {"type": "thinking_delta", "thinking": block["thinking"]}
        return [{**block, "thinking": ""}, added, {"type": "signature_delta", "signature": ""}]
    if block["type"] == "text":
        return [{"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}]
    written = json.dumps(block["input"])
    return [{**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}]


def ending(answer: AgentAnswer) -> dict[str, Any]:
    if answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    if not answer.node.finished:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if answer.message.get("tool_calls") else "end_turn", "stop_sequence": None}
