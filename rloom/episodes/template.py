"""The tokens that the environment's messages add to a conversation, as the model's chat template writes them.

Sampled tokens are never encoded again. After an answer, the template is applied to the whole conversation, the text of
the tokens that the conversation already has is located in it, and only the rest is encoded:

    recorded   <|im_start|>user\\n3 + 4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>
    rendered   <|im_start|>user\\n3 + 4?<|im_end|>\\n<|im_start|>assistant\\n7<|im_end|>\\n<|im_start|>user\\nRight. ...
    added                                                                         \\n<|im_start|>user\\nRight. ...

A template may write the past in another way once messages follow: it drops the reasoning of earlier answers, or moves
the list of tools. Then nothing can be added, and the caller starts a new branch from the rendered conversation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rloom.data.chat import Tokenizer, render_chat, tokenize
from rloom.episodes.base import ToolSchema
from rloom.errors import DataError
from rloom.types import Message

PROBE = "\x02"  # a character that no template writes


@dataclass(frozen=True)
class Conversation:
    """The messages of a branch, the tools that its prompt lists, and the text of its tokens."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    text: str


@dataclass(frozen=True)
class Added:
    """What the environment adds, up to the start of the next answer."""

    conversation: Conversation
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TurnTemplate:
    tokenizer: Tokenizer
    custom_chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template, without its tools

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Added:
        """A conversation from its first messages, up to the start of the first answer."""
        text = self.render(messages, tools)
        [tokens] = tokenize([text], self.tokenizer)
        return Added(Conversation(tuple(messages), tuple(tools), text), tokens)

    def answered(self, past: Conversation, text: str) -> Conversation:
        """`text`: of the answer's tokens, without the stop token."""
        message = {"role": "assistant", "content": self.opening + text}
        return Conversation((*past.messages, message), past.tools, past.text + text)

    def add(self, past: Conversation, messages: Sequence[Message], stop: str) -> Added | None:
        """The messages after the last answer. None: the template writes the past in another way.

        `stop`: the text of the stop token that ended the answer; "": none did.
        """
        whole = (*past.messages, *messages)
        rendered = self.render(whole, past.tools)
        end = end_of(past.text, rendered)
        if end is None:
            return None
        rest = rendered[end:]
        if stop and rest.lstrip().startswith(stop):
            rest = rest.lstrip().removeprefix(stop)
        return Added(Conversation(whole, past.tools, past.text + stop + rest), self.encode_after(stop, rest))

    @cached_property
    def opening(self) -> str:
        """What the template writes before an answer that belongs to its text, such as "<think>" of a model that always
        reasons: a later turn reads it as a part of the message."""
        question = {"role": "user", "content": "?"}
        try:
            before = self.render([question])
            answered = self.render([question, {"role": "assistant", "content": PROBE}], answered=True)
        except DataError:  # a template that refuses this conversation
            return ""
        head = answered.partition(PROBE)[0]
        return before[len(head) :] if PROBE in answered and before.startswith(head) else ""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, answered: bool = False) -> str:
        variables = {**self.variables, "tools": list(tools)} if tools else self.variables
        return render_chat(messages, self.tokenizer, self.custom_chat_template, answered=answered, variables=variables)

    def encode_after(self, stop: str, text: str) -> tuple[int, ...]:
        """Tokens of the text. Some tokenizers begin every text with a space: it is encoded behind the stop token."""
        if stop:
            (stop_token, *_), (first, *rest) = tokenize([stop, stop + text], self.tokenizer)
            if first == stop_token:
                return tuple(rest)
        return tokenize([text], self.tokenizer)[0]


def end_of(text: str, rendered: str) -> int | None:
    """Where the text ends in the rendered conversation. None: it is not its beginning.

    White space does not count: templates strip answers and put lines between reasoning and answer.
    """
    place = end = 0
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
    """How many characters are equal from these places on. Compares halves: a character at a time is slow in Python."""
    low, high = 0, min(len(first) - start, len(second) - other)
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
