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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rloom.data.chat import Tokenizer, render_chat, tokenize
from rloom.errors import DataError
from rloom.types import Message

PROBE = "\x02"  # a character that no template writes


@dataclass(frozen=True)
class Conversation:
    """The messages of a branch and the text of its tokens, in pieces."""

    messages: tuple[Message, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Added:
    """What the environment adds, up to the start of the next answer."""

    conversation: Conversation
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TurnTemplate:
    tokenizer: Tokenizer
    custom_chat_template: str | None = None
    variables: Mapping[str, Any] | None = None  # further ones of the template, such as its tools

    def start(self, messages: Sequence[Message]) -> Added:
        """A conversation from its first messages, up to the start of the first answer."""
        text = self.render(messages)
        [tokens] = tokenize([text], self.tokenizer)
        return Added(Conversation(tuple(messages), (text,)), tokens)

    def answered(self, past: Conversation, text: str) -> Conversation:
        """`text`: of the answer's tokens, without the stop token."""
        message = {"role": "assistant", "content": self.opening + text}
        return Conversation((*past.messages, message), (*past.texts, text))

    def add(self, past: Conversation, messages: Sequence[Message], stop: str) -> Added | None:
        """The messages after the last answer. None: the template writes the past in another way.

        `stop`: the text of the stop token that ended the answer; "": none did.
        """
        whole = (*past.messages, *messages)
        rendered = self.render(whole)
        end = end_of(past.texts, rendered)
        if end is None:
            return None
        rest = rendered[end:]
        if stop and rest.lstrip().startswith(stop):
            rest = rest.lstrip().removeprefix(stop)
        return Added(Conversation(whole, (*past.texts, stop + rest)), self.encode_after(stop, rest))

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

    def render(self, messages: Sequence[Message], *, answered: bool = False) -> str:
        return render_chat(
            messages, self.tokenizer, self.custom_chat_template, answered=answered, variables=self.variables
        )

    def encode_after(self, stop: str, text: str) -> tuple[int, ...]:
        """Tokens of the text. Some tokenizers begin every text with a space: it is encoded behind the stop token."""
        if stop:
            (stop_token, *_), (first, *rest) = tokenize([stop, stop + text], self.tokenizer)
            if first == stop_token:
                return tuple(rest)
        return tokenize([text], self.tokenizer)[0]


def end_of(texts: Sequence[str], rendered: str) -> int | None:
    """Where the texts end in the rendered conversation. None: they are not its beginning.

    White space does not count: templates strip answers and put lines between reasoning and answer.
    """
    end = 0
    for character in "".join(texts):
        if character.isspace():
            continue
        while end < len(rendered) and rendered[end].isspace():
            end += 1
        if end == len(rendered) or rendered[end] != character:
            return None
        end += 1
    return end
