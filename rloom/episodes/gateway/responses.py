"""OpenAI's Responses: POST /v1/responses."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rloom.episodes.gateway.chat import ChatDialect
from rloom.episodes.gateway.fields import (
    IMAGES,
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

ROLES = ("system", "developer", "user", "assistant")
TEXTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"
ANSWERED = ("reasoning", "function_call")  # items of an answer beside its message


class ResponsesDialect:
    def read(self, body: Body, session: AgentSession) -> Asked:
        fields = Fields(body)
        instructions = fields.text("instructions")
        past = self.past(fields, session)
        given = fields.get("input")
        new = [{"role": "user", "content": given}] if isinstance(given, str) else read_items(as_list(given, "input"))
        system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        choice = fields.get("tool_choice")
        refuse_constrained(choice, (None, "auto", "none"), "tool_choice", "Use auto, and ask for the call in a message")
        form = as_mapping(fields.get("text") or {}, "text").get("format") or {"type": "text"}
        kind = as_mapping(form, "text.format").get("type")
        refuse_constrained(kind, ("text",), "text.format.type", "Use text, and ask for JSON in a message")
        for name in ("background", "conversation", "prompt"):
            if fields.get(name):
                raise Refused("not supported; send the whole input, or previous_response_id", field=name)
        return Asked(
            model=fields.text("model", "rloom"),
            messages=with_names([*system, *past, *new]),
            tools=tuple(read_tool(one, f"tools[{place}]") for place, one in enumerate(fields.items("tools"))),
            max_tokens=fields.positive("max_output_tokens"),
            reads_calls=choice != "none",
            streams=fields.flag("stream"),
            with_logprobs=LOGPROBS in fields.items("include"),
            is_instructed=bool(instructions),
            ignored=fields.ignored(session.run.sampling),
            body=body,
        )

    def past(self, fields: Fields, session: AgentSession) -> list[Message]:
        """The conversation up to an earlier answer, without the instructions, which belong to one request."""
        name = fields.text("previous_response_id")
        if not name:
            return []
        if name not in session.nodes:
            raise Refused("this session has no such response", status=404, field="previous_response_id")
        heard = session.run.writer.heard(session.nodes[name])
        return heard[1:] if name in session.instructed else heard

    def answer(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> dict[str, Any]:
        [answer] = answers
        finished, body = answer.node.finished, asked.body
        sampled = len(answer.node.tokens_L)
        return {
            "id": answer.id,
            "object": "response",
            "created_at": time.time(),
            "status": "completed" if finished else "incomplete",
            "error": None,
            "incomplete_details": None if finished else {"reason": "max_output_tokens"},
            "instructions": body.get("instructions"),
            "max_output_tokens": asked.max_tokens,
            "metadata": body.get("metadata") or {},
            "model": asked.model,
            "output": items(asked, answer, texts),
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": None,
            "usage": {
                "input_tokens": len(answer.prompt),
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(answer.prompt) + sampled,
            },
        }

    def events(self, asked: Asked, answers: Sequence[AgentAnswer], texts: Texts) -> Iterator[Event]:
        whole = self.answer(asked, answers, texts)
        started = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        found: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": started}),
            ("response.in_progress", {"response": started}),
        ]
        for index, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": index}
            found.append(("response.output_item.added", {"output_index": index, "item": opened(item)}))
            found += [(name, {**place, **data}) for name, data in item_events(item)]
            found.append(("response.output_item.done", {"output_index": index, "item": item}))
        found.append((f"response.{whole['status']}", {"response": whole}))
        for number, (name, data) in enumerate(found):
            yield name, {"type": name, "sequence_number": number, **data}

    def error(self, refused: Refused) -> dict[str, Any]:
        return ChatDialect().error(refused)


def read_items(found: Sequence[Any]) -> list[Message]:
    """Items of the same answer (its reasoning, its text, its calls) are one message."""
    messages: list[Message] = []
    answer: dict[str, Any] | None = None  # the answer whose items are read
    for place, one in enumerate(found):
        field = f"input[{place}]"
        item = as_mapping(one, field)
        kind = item.get("type", "message")
        if kind == "function_call_output":
            answer = None
            output = content_text(item.get("output"), f"{field}.output", TEXTS)
            call_id = as_text(item.get("call_id"), f"{field}.call_id")
            messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
            continue
        if kind not in ("message", *ANSWERED):
            raise Refused(f"an item of type {shown(kind)}; {IMAGES}", field=field, code="unsupported_content")
        role = "assistant" if kind in ANSWERED else one_of(item.get("role"), ROLES, f"{field}.role")
        if role != "assistant":
            answer = None
            text = content_text(item.get("content"), f"{field}.content", TEXTS)
            messages.append({"role": "system" if role == "developer" else role, "content": text})
            continue
        if (
            answer is None
            or kind == "reasoning"
            or (kind == "message" and (answer["content"] or "tool_calls" in answer))
        ):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        add_item(answer, kind, item, field)
    return messages


def add_item(answer: dict[str, Any], kind: str, item: Mapping[str, Any], field: str) -> None:
    if kind == "message":
        answer["content"] = content_text(item.get("content"), f"{field}.content", TEXTS)
    elif kind == "function_call":
        call = called(item.get("name"), item.get("arguments"), item.get("call_id"), field)
        answer.setdefault("tool_calls", []).append(call)
    else:
        content = item.get("content") or item.get("summary") or []
        text = content_text(content, f"{field}.content", ("reasoning_text", "summary_text"))
        if text:
            answer["reasoning_content"] = text


def read_tool(found: Any, field: str) -> Mapping[str, Any]:
    tool = as_mapping(found, field)
    if tool.get("type") != "function":
        kind = shown(tool.get("type"))
        raise Refused(f"a tool of type {kind}; use type function, and run it in the agent", field=field)
    return function_schema(tool, "parameters", field)


def items(asked: Asked, answer: AgentAnswer, texts: Texts) -> list[dict[str, Any]]:
    parts = Parts.of(answer)
    status = "completed" if answer.node.finished else "incomplete"
    found: list[dict[str, Any]] = []
    if parts.reasoning:
        content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": parts.reasoning}]
        found.append(
            {"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content, "status": status}
        )
    if parts.text or not parts.calls:
        logprobs = token_logprobs(answer, texts) if asked.with_logprobs else []
        content = [{"type": "output_text", "text": parts.text, "annotations": [], "logprobs": logprobs}]
        found.append(
            {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": content, "status": status}
        )
    for number, (id, name, arguments) in enumerate(parts.calls):
        call = {"call_id": id, "name": name, "arguments": arguments, "status": status}
        found.append({"type": "function_call", "id": f"fc_{answer.id}-{number}", **call})
    return found


def opened(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item as it begins."""
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}


def item_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "function_call":
        name = "response.function_call_arguments"
        yield f"{name}.delta", {"delta": item["arguments"]}
        yield f"{name}.done", {"arguments": item["arguments"], "name": item["name"]}
        return
    [part] = item["content"]
    at = {"content_index": 0}
    name = f"response.{part['type']}"
    with_logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    if item["type"] == "message":
        yield "response.content_part.added", {**at, "part": {**part, "text": "", "logprobs": []}}
    yield f"{name}.delta", {**at, "delta": part["text"], **with_logprobs}
    yield f"{name}.done", {**at, "text": part["text"], **with_logprobs}
    if item["type"] == "message":
        yield "response.content_part.done", {**at, "part": part}
