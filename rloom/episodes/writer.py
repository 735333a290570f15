"""Records one episode: where a conversation goes on from what is recorded, and what is added to it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rloom.episodes.base import ToolCall, ToolSchema
from rloom.episodes.episode import Episode, Node
from rloom.episodes.template import Conversation, TurnTemplate
from rloom.episodes.tool_calls import AUTO
from rloom.errors import DataError
from rloom.rollout.base import Completion
from rloom.types import Message


@dataclass(frozen=True)
class Texts:
    """Between tokens and text, as the model has it."""

    template: TurnTemplate
    decode: Callable[[Sequence[int]], str]  # without special tokens
    stop_texts: Mapping[int, str]  # stop token -> its text
    decode_marked: Callable[[Sequence[int]], str] | None = None  # with special tokens, in which models write calls
    call_format: str = AUTO  # of tool calls


@dataclass
class EpisodeWriter:
    texts: Texts
    episode: Episode = field(default_factory=Episode)
    rewritten: int = 0  # times the chat template wrote the past in another way, which began a branch
    branched: int = 0  # times an agent changed its history, which began a branch

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """A branch from its first message. Returns the node."""
        added = self.texts.template.start(messages, tools)
        return self.episode.add(Node(None, tuple(messages), torch.tensor(added.tokens), added.conversation))

    def add(
        self, parent: int, messages: Sequence[Message], calls: tuple[ToolCall, ...] = (), seconds: float = 0.0
    ) -> int:
        """Messages after an answer. Returns the node, which begins a branch if the template rewrites the past."""
        past = self.episode.nodes[parent]
        added = self.texts.template.add(past.conversation, messages, past.stop)
        if added is None:
            self.rewritten += 1
            node = self.begin([*past.conversation.messages, *messages], past.conversation.tools)
            self.episode.replace(node, calls=calls, seconds=seconds)
            return node
        tokens_L = torch.tensor(added.tokens, dtype=torch.int64)
        return self.episode.add(
            Node(parent, tuple(messages), tokens_L, added.conversation, calls=calls, seconds=seconds)
        )

    def read(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """The node after which the next answer of this conversation is generated. What an agent sends is the whole
        history: recorded messages are found in it, others are added."""
        nodes = self.episode.nodes
        known = [index for index in range(len(nodes)) if self.goes_on(index, messages, tools)]
        best = max(known, key=lambda index: len(self.heard(index)), default=None)
        if best is not None and not nodes[best].sampled:
            return best
        if best is not None:
            return self.add(best, messages[len(self.heard(best)) :])
        if messages[-1]["role"] == "assistant":
            raise DataError("the last message is the assistant's; an answer cannot be continued")
        self.branched += bool(nodes)
        return self.begin(messages, tools)

    def goes_on(self, index: int, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> bool:
        """Whether the conversation is that of this node, or goes on from this answer."""
        node, heard = self.episode.nodes[index], self.heard(index)
        fits = len(heard) < len(messages) if node.sampled else len(heard) == len(messages)
        return fits and list(node.conversation.tools) == list(tools) and all(map(same_message, heard, messages))

    def read_tokens(self, tokens: Sequence[int]) -> int:
        """As `read`, for an agent that sends tokens."""
        best, length = None, -1
        for index, node in enumerate(self.episode.nodes):
            path = self.episode.tokens(index)
            whole = len(path) == len(tokens)
            if (node.sampled or whole) and len(path) > length and path == list(tokens[: len(path)]):
                best, length = index, len(path)
        if best is not None and length == len(tokens):
            return best
        self.branched += best is None and bool(self.episode.nodes)
        added = torch.tensor(tokens[max(length, 0) :], dtype=torch.int64)
        text = self.texts.decode(added.tolist())
        return self.episode.add(Node(best, (), added, Conversation((), (), text)))

    def answer(self, parent: int, completion: Completion, seconds: float = 0.0) -> int:
        """An answer of the policy. Returns its node."""
        tokens: list[int] = completion.tokens_L.tolist()
        text = self.texts.decode(tokens[:-1] if completion.finished else tokens)
        before = self.episode.nodes[parent].conversation
        return self.episode.add(
            Node(
                parent,
                ({"role": "assistant", "content": text},),
                completion.tokens_L,
                self.texts.template.answered(before, text),
                sampled=True,
                logprobs_L=completion.logprobs_L,
                version=completion.version,
                finished=completion.finished,
                stop=self.texts.stop_texts[tokens[-1]] if completion.finished else "",
                seconds=seconds,
                experts_PMK=completion.experts_LMK,
            )
        )

    def text(self, answer: int) -> str:
        return str(self.episode.nodes[answer].messages[0]["content"])

    def marked_text(self, answer: int) -> str | None:
        """With special tokens; None: they change nothing."""
        if self.texts.decode_marked is None:
            return None
        node = self.episode.nodes[answer]
        tokens = node.tokens_L.tolist()
        marked = self.texts.decode_marked(tokens[:-1] if node.finished else tokens)
        return None if marked == self.text(answer) else marked

    def heard(self, leaf: int) -> list[Message]:
        """The messages up to this node, as an agent has them."""
        found: list[Message] = []
        for index in self.episode.path(leaf):
            node = self.episode.nodes[index]
            found += node.messages if node.shown is None else [node.shown]
        return found


def same_message(one: Message, other: Message) -> bool:
    """Clients leave out or add fields that are empty, and write arguments of calls with other spaces."""
    return comparable(one) == comparable(other)


def comparable(message: Message) -> tuple[Any, ...]:
    calls = [
        (call.get("function", {}).get("name"), parsed(call.get("function", {}).get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return message.get("role"), (message.get("content") or "").strip(), calls, message.get("tool_call_id")


def parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
