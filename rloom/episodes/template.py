"""The tokens that the environment's messages add to a conversation, as the model's chat template writes them.

Sampled tokens are never encoded again. After an answer, the template is applied to the whole conversation, the text
before the answer and the answer are located in it, and only the rest is encoded:

    recorded   <|im_start|>user\\n3 + 4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>
    rendered   <|im_start|>user\\n3 + 4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>\\n<|im_start|>user\\nRight. ...
    added                                                                         \\n<|im_start|>user\\nRight. ...

A template may write the past in another way once messages follow: it drops the reasoning of earlier answers, or moves
the list of tools. Then nothing can be added, and the caller starts a new branch from the rendered conversation.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from rloom.data.chat import Tokenizer, render_chat, tokenize
from rloom.episodes.base import ToolSchema
from rloom.episodes.tool_calls import (
    AUTO,
    CODE_BLOCK,
    described_blocks,
    end_of_block,
    parse_tool_calls,
    without_calls,
)
from rloom.errors import DataError
from rloom.types import Message

log = logging.getLogger(__name__)
PROBE = "Probe7Q"  # a text that no template changes
# written before an answer and read as a part of its text: the tag of a model that always reasons
OPENING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
CHANNEL = re.compile(  # of gpt-oss: its name between two places of the tool that it calls, and its text
    r"(?:\bto=functions\.([\w.-]+))?<\|channel\|>(\w+)(?:\s+to=functions\.([\w.-]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(.*?)(?=<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class RenderedConversation:
    """The messages of a branch, the tools that its prompt lists, and its text before the last or the next answer."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    text: str  # as the template wrote it
    answer: str = ""  # the text of the last message, if the policy wrote it


@dataclass(frozen=True)
class Added:
    """What the environment adds, up to the start of the next answer."""

    conversation: RenderedConversation
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TurnTemplate:
    tokenizer: Tokenizer
    special_texts: frozenset[str] = frozenset()  # of tokens that only the template and the policy may write
    call_format: str = AUTO  # of tool calls

    @property
    def source(self) -> str:
        """The template itself; of several, all."""
        return str(self.tokenizer.chat_template or "")

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Added:
        """A conversation from its first messages, up to the start of the first answer."""
        text = self.render(messages, tools)
        [tokens] = tokenize([text], self.tokenizer)
        return Added(RenderedConversation(tuple(messages), tuple(tools), text), tokens)

    def answered(self, past: RenderedConversation, text: str, stop: str) -> RenderedConversation:
        """`text`: of the answer's tokens without the stop token; with the special tokens that the template writes."""
        mark = self.mark_before(stop)
        message = {"role": "assistant", "content": opening_of(past) + text.removesuffix(mark)}
        return RenderedConversation((*past.messages, message), past.tools, past.text, text)

    def add(self, past: RenderedConversation, messages: Sequence[Message], stop: str) -> Added | None:
        """The messages after the last answer. None: the template writes the past in another way.

        `stop`: the text of the stop token that ended the answer; "": none did.
        """
        whole = (*past.messages, *messages)
        rendered = self.render(whole, past.tools)
        before = past.text.rstrip()  # templates put other white space between this and a past answer
        if not rendered.startswith(before):
            return None
        end = end_of(past.text[len(before) :] + past.answer, rendered, len(before))
        if end is None:
            return None
        rest = rendered[end:]
        if stop and rest.lstrip().startswith(stop):
            rest = rest.lstrip().removeprefix(stop)
        elif self.mark_before(stop) or rest.lstrip() != self.after_answer(past, messages).lstrip():
            return None  # further text of the answer, such as the marks around one without reasoning
        return Added(RenderedConversation(whole, past.tools, rendered), self.encode_after(stop, rest))

    def after_answer(self, past: RenderedConversation, messages: Sequence[Message]) -> str:
        """What the template writes after an answer, when these messages follow."""
        probe = {"role": "assistant", "content": opening_of(past) + PROBE}
        return self.render([*past.messages[:-1], probe, *messages], past.tools).rpartition(PROBE)[2]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        """The text up to the start of the next answer. DataError: the template refuses the messages."""
        if self.needs_calls is not False and self.call_format == CODE_BLOCK:
            messages = [{**one, "role": "user"} if one["role"] == "tool" else one for one in messages]
        if any(message["role"] == "tool" for message in messages):
            if self.needs_calls is None:
                raise DataError(
                    "the chat template does not write the results of tools; set actor_rollout_ref.model."
                    "custom_chat_template to one that does, or use an environment that answers in place of a user"
                )
            messages = list(with_calls(messages)) if self.needs_calls else messages
        return self.render_plain(messages, tools)

    def render_plain(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        if tools and self.call_format == CODE_BLOCK:  # the template would ask for calls in its own form
            messages, tools = with_described_blocks(messages, tools), ()
        read = list(map(readable, self.without_special_texts(messages)))
        return render_chat(read, self.tokenizer, variables={"tools": list(tools)} if tools else {})

    def ends_of_calls(self, past: RenderedConversation) -> tuple[re.Pattern[str], ...]:
        """What ends the answer after this conversation before the model ends it: text behind a block of code would be
        written without its result. Not of a model that always reasons: its reasoning may have such blocks."""
        blocks = self.call_format == CODE_BLOCK and past.tools and not opening_of(past)
        return (end_of_block(past.tools),) if blocks else ()

    def without_special_texts(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Special tokens in the texts of tools and environments are written with a space: as tokens, a page that a tool
        reads could end its message and begin one of the assistant. The first prompt is the run's own, and an answer has
        the tokens that the policy sampled."""
        found, follows = list[Message](), False
        for message in messages:
            follows = follows or message["role"] == "assistant"
            others = message["role"] == "tool" or (follows and message["role"] != "assistant")
            found.append(self.without_special_text(message) if others and self.special_texts else message)
        return found

    def without_special_text(self, message: Message) -> Message:
        read = {key: self.special.sub(broken, value) for key, value in message.items() if isinstance(value, str)}
        if all(message[key] == value for key, value in read.items()):
            return message
        warn_of_special_texts()
        return {**message, **read}

    @cached_property
    def special(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    @cached_property
    def closing(self) -> str:
        """What the template writes after an answer, when a question follows."""
        question = {"role": "user", "content": "?"}
        try:
            text = self.render_plain([question, {"role": "assistant", "content": PROBE}, question])
        except DataError:  # a template that refuses this conversation
            return ""
        return text.rpartition(PROBE)[2] if PROBE in text else ""

    def mark_before(self, stop: str) -> str:
        """What the template writes between an answer and this stop token; the model has to write it, too."""
        return self.closing.partition(stop)[0].strip() if stop and stop in self.closing else ""

    @cached_property
    def needs_calls(self) -> bool | None:
        """Whether the template writes a tool's result only after a message whose calls are apart from its text. None:
        it writes no such result."""
        call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        plain: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": call},
            {"role": "tool", "name": "f", "content": PROBE},
        ]
        for messages, needed in ((plain, False), (list(with_calls(plain)), True)):
            with suppress(DataError):  # a template that refuses this conversation
                if PROBE in self.render_plain(messages):
                    return needed
        return None

    @cached_property
    def longest_token(self) -> int:
        """Characters; more than its text has, in tokenizers that write it in another way."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode_after(self, stop: str, text: str) -> tuple[int, ...]:
        """Tokens of the text. Some tokenizers begin every text with a space: it is encoded behind the stop token."""
        if stop:
            before, whole = tokenize([stop, stop + text], self.tokenizer)
            if len(before) == 1 and whole[:1] == before:
                return whole[1:]
        return tokenize([text], self.tokenizer)[0]


def broken(special: re.Match[str]) -> str:
    return f"{special[0][0]} {special[0][1:]}"


@cache
def warn_of_special_texts() -> None:
    log.warning(
        "A tool or an environment returned a special token of the model, such as its end of a turn, as text. It is "
        "written with a space, so that it is no control token"
    )


def opening_of(past: RenderedConversation) -> str:
    """What the template wrote before the answer and reads as a part of it."""
    found = OPENING.search(past.text)
    return found[0] if found else ""


def with_described_blocks(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """The first message of the user says which blocks of code are calls."""
    place = next((place for place, one in enumerate(messages) if one["role"] == "user"), 0)
    first = {**messages[place], "content": f"{messages[place].get('content') or ''}{described_blocks(tools)}"}
    return [*messages[:place], first, *messages[place + 1 :]]


def readable(message: Message) -> Message:
    """As templates read it: the channels of gpt-oss apart, and the arguments of calls as mappings."""
    if message["role"] == "assistant" and "<|channel|>" in (message.get("content") or ""):
        return without_channels(message)
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [with_mapping(call) for call in message["tool_calls"]]}


def with_mapping(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") or {}
    if not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": arguments_of(function["arguments"])}}


def arguments_of(text: str) -> Any:
    """A mapping; the text if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def without_channels(message: Message) -> Message:
    """An answer of gpt-oss: its reasoning, its calls and its final text."""
    reasoning, final, calls = list[str](), list[str](), list[tuple[str, Any]]()
    for recipient, channel, tool, text in CHANNEL.findall(message["content"]):
        if recipient or tool:
            calls.append((recipient or tool, arguments_of(text)))
        else:
            (reasoning if channel == "analysis" else final).append(text)
    found: dict[str, Any] = {"role": "assistant", "content": "".join(final)}
    if reasoning:
        found["thinking"] = "".join(reasoning)
    if calls:
        found["tool_calls"] = [as_tool_call(number, *call) for number, call in enumerate(calls)]
    return found


def with_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with the calls of tools apart from the text of the answers, and the results with their ids. The
    result of a call that cannot be read, which is its error, is a message of the user."""
    ids: list[str | None] = []  # of calls without a result, in their order; None: the call cannot be read
    made = 0
    for message in messages:
        if message["role"] == "assistant":
            message = readable(message)
            found = list(message.get("tool_calls") or ())
            ids = [call["id"] for call in found]
            calls = [] if found else parse_tool_calls(message["content"] or "")
            if calls:
                readable_ones = [call for call in calls if call.error is None]
                found = [
                    as_tool_call(made + number, call.name, call.arguments) for number, call in enumerate(readable_ones)
                ]
                left = iter(found)
                ids = [next(left)["id"] if call.error is None else None for call in calls]
            if calls and found:
                message = {**message, "content": without_calls(message["content"]), "tool_calls": found}
            made += len(found)
        elif message["role"] == "tool" and "tool_call_id" not in message:
            own = ids.pop(0) if ids else None
            message = {**message, **({"role": "user"} if own is None else {"tool_call_id": own})}
        yield message


def as_tool_call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    """Mistral's templates demand ids of nine letters and digits."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def end_of(text: str, rendered: str, start: int = 0) -> int | None:
    """Where the text ends in the rendered conversation, in which it begins at `start`. None: it is not there.

    White space does not count: templates strip answers and put lines between reasoning and answer.
    """
    place, end = 0, start
    while place < len(text):
        equal = common_length(text, place, rendered, end)
        place, end = place + equal, end + equal
        skipped = spaces(text, place), spaces(rendered, end)
        if not equal and not any(skipped):
            return None
        place += skipped[0]
        if place < len(text):  # white space behind the text belongs to what follows
            end += skipped[1]
    return end


def common_length(first: str, start: int, second: str, other: int) -> int:
    """How many characters are equal from these places on. Compares slices: a character at a time is slow in Python."""
    low, size, most = 0, 64, min(len(first) - start, len(second) - other)
    while low < most and first[start + low : start + low + size] == second[other + low : other + low + size]:
        low, size = low + size, size * 2
    high = min(low + size, most)
    low = min(low, most)
    while low < high:
        middle = (low + high + 1) // 2
        if first[start + low : start + middle] == second[other + low : other + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def spaces(text: str, start: int) -> int:
    """White space from this place on."""
    end = start
    while end < len(text) and text[end].isspace():
        end += 1
    return end - start
