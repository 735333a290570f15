"""Calls of tools in the text of an answer.

| form | models |
| --- | --- |
| `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Qwen, Hermes |
| `{"name": ..., "parameters": {...}}`, the whole answer | Llama 3 |
| `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` | Mistral |
"""

import json
import re
from dataclasses import dataclass
from typing import Any

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
LISTED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class ParsedCall:
    name: str
    arguments: Any  # a mapping; the text if it could not be read
    error: str | None = None


def parse_tool_calls(text: str) -> list[ParsedCall]:
    """In the order in which they were written. A call inside the reasoning is not one."""
    text = THINKING.sub("", text)
    if tagged := TAGGED.findall(text):
        return [parse_call(body) for body in tagged]
    if listed := LISTED.search(text):
        return parse_list(listed[1])
    whole = text.strip()
    if whole.startswith("{") and '"name"' in whole and ('"parameters"' in whole or '"arguments"' in whole):
        return [parse_call(whole)]
    return []


def without_calls(text: str) -> str:
    """The text around the calls."""
    return LISTED.sub("", TAGGED.sub("", text)).strip() if TAGGED.search(text) or LISTED.search(text) else ""


def split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, the rest) of an answer. Example: split_reasoning("<think>hm</think>7") is ("hm", "7")."""
    reasoning = "\n".join(found[1].strip() for found in THINKING.finditer(text))
    return reasoning, THINKING.sub("", text).strip() if reasoning or THINKING.search(text) else text


def parse_list(body: str) -> list[ParsedCall]:
    try:
        return [as_call(one, body) for one in json.loads(body)]
    except (ValueError, TypeError) as error:
        return [ParsedCall("", body, f"the list of calls is not valid JSON: {error}")]


def parse_call(body: str) -> ParsedCall:
    try:
        return as_call(json.loads(body), body)
    except (ValueError, RecursionError) as error:
        return ParsedCall("", body, f"the call is not valid JSON: {error}")


def as_call(found: Any, body: str) -> ParsedCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ParsedCall("", body, 'a call must have the form {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's form: JSON in a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ParsedCall(found["name"], arguments, f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ParsedCall(found["name"], arguments, "the arguments must be a JSON object")
    return ParsedCall(found["name"], arguments)
