"""The tokens that the environment's messages add to a conversation, as the model's chat template writes them.

Sampled tokens are never encoded again. After an answer, the template is applied to the whole conversation, the text of
the tokens that the conversation already has is located in it, and only the rest is encoded:

    recorded   <|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n|7<|im_end|>|
    rendered   <|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n 7<|im_end|>\n<|im_start|>user\nRight.<|im_end|>\n...
    added                                                                            |\n<|im_start|>user\nRight. ...

A template may write the past in another way once messages follow: it drops the reasoning of earlier answers, or moves
the list of tools. Then nothing can be added, and the caller starts a new branch from the rendered conversation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.data.chat import Tokenizer, render_chat, tokenize
from rloom.types import Message


@dataclass(frozen=True)
class Segment:
    """Text of consecutive tokens of a conversation: of one answer, or of what stands between answers."""

    text: str
    sampled: bool


@dataclass(frozen=True)
class Conversation:
    """The messages of a branch and the text of its tokens."""

    messages: tuple[Message, ...]
    segments: tuple[Segment, ...]

    def answered(self, message: Message, text: str) -> "Conversation":
        return Conversation((*self.messages, message), (*self.segments, Segment(text, sampled=True)))


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
        return Added(
            Conversation(tuple(messages), (Segment(text, sampled=False),)), tokenize([text], self.tokenizer)[0]
        )

    def add(self, past: Conversation, messages: Sequence[Message], stop: str) -> Added | None:
        """The messages after the last answer. None: the template writes the past in another way.

        `stop`: the text of the stop token that ended the answer, which is the last of its tokens; "": none did.
        """
        whole = (*past.messages, *messages)
        rendered = self.render(whole)
        end = end_of(past.segments, rendered)
        if end is None:
            return None
        rest = rendered[end:]
        if stop and rest.lstrip().startswith(stop):
            rest = rest.lstrip().removeprefix(stop)
        segments = (
            *past.segments,
            Segment(stop + rest, sampled=False),
        )  # the text of an answer is without its stop token
        return Added(Conversation(whole, segments), self.encode_after(stop, rest))

    def render(self, messages: Sequence[Message]) -> str:
        return render_chat(messages, self.tokenizer, self.custom_chat_template, variables=self.variables)

    def encode_after(self, stop: str, text: str) -> tuple[int, ...]:
        """Tokens of the text. Some tokenizers begin every text with a space: it is encoded behind the stop token."""
        if stop:
            (stop_token, *_), (first, *rest) = tokenize([stop, stop + text], self.tokenizer)
            if first == stop_token:
                return tuple(rest)
        return tokenize([text], self.tokenizer)[0]


def end_of(segments: Sequence[Segment], rendered: str) -> int | None:
    """Where the text of the segments ends in the rendered conversation. None: it is not its beginning.

    White space does not count: templates strip answers and put lines between reasoning and answer.
    """
    end = 0
    for character in "".join(segment.text for segment in segments):
        if character.isspace():
            continue
        while end < len(rendered) and rendered[end].isspace():
            end += 1
        if end == len(rendered) or rendered[end] != character:
            return None
        end += 1
    return end
