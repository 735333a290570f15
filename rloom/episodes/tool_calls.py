"""Calls of tools in the text of an answer, in the forms that models write.

| format | form | models |
| --- | --- | --- |
| hermes | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Qwen2.5, Qwen3, Hermes |
| qwen3_coder | `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` | Qwen3-Coder |
| glm | `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>` | GLM 4.5 and later |
| llama3_json | `{"name": ..., "parameters": {...}}`, the whole answer; several with `;` between them | Llama 3 |
| mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]NAME[ARGS]{...}` | Mistral |
| gpt-oss | `... to=functions.NAME ...<|message|>{...}<|call|>` | gpt-oss |
| gemma | a block `tool_code` with Python calls, or `call:NAME{KEY:VALUE}` between its tags | Gemma 3, 4 |
| deepseek | `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` | DeepSeek V3, R1 |
| code_block | a Markdown block whose language is the name of the tool or of its only argument | models without calls |

A call that cannot be read is an error with its reason, which the policy reads; nothing is filled in for it.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.episodes.base import ToolSchema

AUTO, CODE_BLOCK = "auto", "code_block"
LANGUAGES = {"python", "sql", "bash", "sh", "javascript", "lean"}  # that models write after ```
Types = Mapping[str, Mapping[str, Any]]  # tool -> argument -> its schema


@dataclass(frozen=True)
class ParsedCall:
    name: str
    arguments: Any  # a mapping; the text if it could not be read
    error: str | None = None


@dataclass(frozen=True)
class Found:
    """A call and its place in the text."""

    start: int
    end: int
    call: ParsedCall


Parser = Callable[[str, Types], list[Found]]


def parse_tool_calls(text: str, format: str = AUTO, tools: Sequence[ToolSchema] = ()) -> list[ParsedCall]:
    """In the order in which they were written. A call inside the reasoning is not one.

    `tools`: what a form without types needs to tell the number 3 from the text "3".
    """
    return [found.call for found in found_calls(text, format, tools)]


def without_calls(text: str, format: str = AUTO, tools: Sequence[ToolSchema] = ()) -> str:
    """The text around the calls that `parse_tool_calls` finds."""
    kept, end = [], 0
    for found in found_calls(text, format, tools):
        kept.append(text[end : found.start])
        end = max(end, found.end)
    return "".join([*kept, text[end:]]).strip()


def found_calls(text: str, format: str = AUTO, tools: Sequence[ToolSchema] = ()) -> list[Found]:
    spoken, types = without_reasoning(text), argument_types(tools)
    parsers = EVERY if format == AUTO else (FORMATS[format],)
    return next((found for parser in parsers if (found := parser(spoken, types))), [])


REASONING = re.compile(
    r"<think>.*?(?:</think>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)",
    re.DOTALL,
)
OPENED_BEFORE = re.compile(r"\A(?:(?!<think>).)*</think>", re.DOTALL)  # the template has written <think>


def without_reasoning(text: str) -> str:
    """The text with spaces in place of the reasoning: what is left keeps its place."""
    if "</think>" in text:
        text = OPENED_BEFORE.sub(blank, text)
    return REASONING.sub(blank, text)


def blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


def split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, the rest) of an answer. Example: split_reasoning("<think>hm</think>7") is ("hm", "7")."""
    reasoning = "\n".join(found[1].strip() for found in THINKING.finditer(text))
    return reasoning, THINKING.sub("", text).strip() if reasoning or THINKING.search(text) else text


def argument_types(tools: Sequence[ToolSchema]) -> Types:
    functions = [tool["function"] for tool in tools if "function" in tool]
    return {one["name"]: (one.get("parameters") or {}).get("properties") or {} for one in functions}


TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
NAMED = re.compile(r"\s*([A-Za-z_][\w.:-]*)\s*((?:<arg_key>.*)?)", re.DOTALL)
PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def tagged(text: str, types: Types) -> list[Found]:
    """Each in the form that its body has."""
    return [Found(*one.span(), reader_of(one[1])(one[1], types)) for one in TAGGED.finditer(text)]


def reader_of(body: str) -> Callable[[str, Types], ParsedCall]:
    if "<function=" in body:
        return function_call
    return pairs_call if NAMED.fullmatch(body) else json_call


def json_call(body: str, types: Types) -> ParsedCall:
    return parse_call(body)


def function_call(body: str, types: Types) -> ParsedCall:
    found = FUNCTION.match(body)
    if found is None:
        return ParsedCall("", body, "a call must have the form <function=NAME>...</function>")
    name, inner = found[1].strip(), found[2]
    if "<parameter=" in PARAMETER.sub("", inner):
        return ParsedCall(name, inner, "a <parameter=NAME> has no </parameter>")
    texts = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in PARAMETER.findall(inner)}
    return ParsedCall(name, typed(texts, types.get(name, {})))


def pairs_call(body: str, types: Types) -> ParsedCall:
    found = NAMED.fullmatch(body)
    if found is None or PAIR.sub("", found[2]).strip():
        reason = "a call must have the form NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"
        return ParsedCall("" if found is None else found[1], body, reason)
    name, pairs = found[1], PAIR.findall(found[2])
    return ParsedCall(name, typed({key.strip(): value for key, value in pairs}, types.get(name, {})))


def tagged_as(reader: Callable[[str, Types], ParsedCall]) -> Parser:
    return lambda text, types: [Found(*one.span(), reader(one[1], types)) for one in TAGGED.finditer(text)]


def typed(texts: Mapping[str, str], types: Mapping[str, Any]) -> dict[str, Any]:
    """Texts as values of the types that the tool declares. A text that is not of its type stays a text."""
    return {key: value if is_text(types.get(key)) else json_or_text(value) for key, value in texts.items()}


def is_text(schema: Any) -> bool:
    return not isinstance(schema, Mapping) or schema.get("type", "string") == "string"


def json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(value, value)


def llama3_json(text: str, types: Types) -> list[Found]:
    start = text.find("<|python_tag|>")
    body = text[start + len("<|python_tag|>") :] if start >= 0 else text
    whole = body.strip()
    if (
        not whole.startswith("{")
        or '"name"' not in whole
        or ('"parameters"' not in whole and '"arguments"' not in whole)
    ):
        return []
    calls, place = [], max(start, 0)
    try:
        decoder, rest = json.JSONDecoder(), whole
        while rest:
            found, end = decoder.raw_decode(rest)
            calls.append(as_call(found, rest[:end]))
            rest = rest[end:].lstrip("; \n")
    except (ValueError, RecursionError) as error:
        calls = [ParsedCall("", whole, f"the call is not valid JSON: {error}")]
    return [Found(place, len(text), call) for call in calls]


LISTED = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
MISTRAL_CALL = re.compile(
    r"\[TOOL_CALLS\]\s*(?!\[)(.*?)(?:\[CALL_ID\].*?)?\[ARGS\](.*?)(?=\[TOOL_CALLS\]|</s>|\Z)", re.DOTALL
)
MISTRAL_START = re.compile(r"\[TOOL_CALLS\].*", re.DOTALL)


def mistral(text: str, types: Types) -> list[Found]:
    if listed := LISTED.search(text):
        return [Found(*listed.span(), call) for call in parse_list(listed[1])]
    if named := [Found(*one.span(), named_call(one[1], one[2])) for one in MISTRAL_CALL.finditer(text)]:
        return named
    if begun := MISTRAL_START.search(text):
        return [Found(*begun.span(), ParsedCall("", begun[0], "[TOOL_CALLS] must be followed by a list of calls"))]
    return []


HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.([\w.-]+)(?:<\|channel\|>\w+)?\s*"
    r"(?:<\|constrain\|>)?\w*\s*<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|\Z)",
    re.DOTALL,
)


def gpt_oss(text: str, types: Types) -> list[Found]:
    return [Found(*one.span(), named_call(one[1], one[2])) for one in HARMONY.finditer(text)]


CODE = re.compile(r"```tool_code\s*\n(.*?)(?:```|\Z)", re.DOTALL)
BRACES = re.compile(r"(?:<start_function_call>|<\|tool_call>)(.*?)(?:<end_function_call>|<tool_call\|>|\Z)", re.DOTALL)
NAME_AND_BRACES = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*", re.DOTALL)
QUOTE = re.compile(r'<escape>|<\|"\|>')
BARE_KEY = re.compile(r"(?<=[{,])\s*([\w.-]+)\s*:")


def gemma(text: str, types: Types) -> list[Found]:
    code = [Found(*one.span(), call) for one in CODE.finditer(text) for call in python_calls(one[1])]
    return code or [Found(*one.span(), braces_call(one[1])) for one in BRACES.finditer(text)]


def python_calls(code: str) -> list[ParsedCall]:
    """Calls with literal arguments, one a line; `print(...)` around one is left out. No code runs."""
    try:
        parsed = ast.parse(code.strip()).body
        return [python_call(statement, code) for statement in parsed]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [ParsedCall("", code, f"the code is not valid Python: {error}")]


def python_call(statement: ast.stmt, code: str) -> ParsedCall:
    call = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and len(call.args) == 1:
        call = call.args[0]
    if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
        return ParsedCall("", code, "a call must have the form name(argument=value)")
    name = ast.unparse(call.func)
    try:
        return ParsedCall(name, {str(one.arg): ast.literal_eval(one.value) for one in call.keywords})
    except ValueError:
        return ParsedCall(name, code, "arguments must be plain values")


def braces_call(body: str) -> ParsedCall:
    found = NAME_AND_BRACES.fullmatch(body)
    if found is None:
        return ParsedCall("", body, "a call must have the form call:NAME{KEY:VALUE}")
    parts = QUOTE.split(found[2])  # every second part is a text
    quoted = [json.dumps(part) if place % 2 else BARE_KEY.sub(r'"\1":', part) for place, part in enumerate(parts)]
    return named_call(found[1], "".join(quoted))


DEEPSEEK = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<]+?)\s*(?:<｜tool▁sep｜>|\n)"
    r"(.*?)(?:<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?|\Z)",
    re.DOTALL,
)
FENCE = re.compile(r"\s*```(?:json)?\s*\n?(.*?)\n?\s*```\s*", re.DOTALL)


def deepseek(text: str, types: Types) -> list[Found]:
    return [Found(*one.span(), named_call(one[1], FENCE.sub(r"\1", one[2]))) for one in DEEPSEEK.finditer(text)]


BLOCK = re.compile(r"^```([\w-]+)[ \t]*\n(.*?)```", re.DOTALL | re.MULTILINE)


def code_blocks(text: str, types: Types) -> list[Found]:
    """Blocks in other languages, and those that are not closed, are text."""
    languages = block_languages(types)
    return [
        Found(*one.span(), ParsedCall(languages[one[1]][0], {languages[one[1]][1]: one[2]}))
        for one in BLOCK.finditer(text)
        if one[1] in languages
    ]


def block_languages(types: Types) -> dict[str, tuple[str, str]]:
    """What follows ``` -> tool and argument."""
    return {
        language: (tool, next(iter(arguments)))
        for tool, arguments in types.items()
        if len(arguments) == 1
        for language in (tool, *arguments)
    }


def described_blocks(tools: Sequence[ToolSchema]) -> str:
    """What a prompt says of tools that blocks call: no chat template knows this form."""
    lines, types = list[str](), argument_types(tools)
    for function in (tool["function"] for tool in tools if len(types[tool["function"]["name"]]) == 1):
        [(argument, schema)] = types[function["name"]].items()
        language = argument if argument in LANGUAGES else function["name"]
        said = " ".join(filter(None, (function.get("description"), schema.get("description"))))
        lines.append(f"{said}\n```{language}\n...\n```")  # its form on lines of its own: models copy it
    return (
        "\n\nYou can call a tool with a block of code:\n"
        + "\n".join(lines)
        + "\nWrite nothing after the block. The next "
        "message is its result. When you know the answer, write it without a block."
    )


def end_of_block(tools: Sequence[ToolSchema]) -> re.Pattern[str]:
    """Finds a call that is complete. A block in the reasoning is none."""
    languages = "|".join(map(re.escape, block_languages(argument_types(tools))))
    return re.compile(rf"\A(?:(?!<think>).)*?^```(?:{languages})[ \t]*\n.*?```", re.DOTALL | re.MULTILINE)


def parse_list(body: str) -> list[ParsedCall]:
    try:
        return [as_call(one, body) for one in json.loads(body)]
    except (ValueError, TypeError, RecursionError) as error:
        return [ParsedCall("", body, f"the list of calls is not valid JSON: {error}")]


def parse_call(body: str) -> ParsedCall:
    try:
        return as_call(json.loads(body), body)
    except (ValueError, RecursionError) as error:
        return ParsedCall("", body, f"the call is not valid JSON: {error}")


def named_call(name: str, body: str) -> ParsedCall:
    """A call whose name is outside its JSON."""
    return as_call({"name": name.strip(), "arguments": body.strip()}, body)


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


FORMATS: Mapping[str, Parser] = {
    "hermes": tagged_as(json_call),
    "qwen": tagged_as(json_call),
    "qwen3_coder": tagged_as(function_call),
    "glm": tagged_as(pairs_call),
    "llama3_json": llama3_json,
    "mistral": mistral,
    "gpt-oss": gpt_oss,
    "gemma": gemma,
    "gemma4": gemma,
    "deepseek": deepseek,
    CODE_BLOCK: code_blocks,  # not in EVERY: models write blocks that are no calls
}
EVERY: tuple[Parser, ...] = (tagged, mistral, gpt_oss, deepseek, gemma, llama3_json)
