"""Records one episode: where a conversation goes on from what is recorded, and what is added to it."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rloom.episodes.base import ToolCall, ToolSchema
from rloom.episodes.episode import Episode, Node
from rloom.episodes.template import Conversation, TurnTemplate
from rloom.episodes.tool_calls import AUTO, split_reasoning
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
            heard = (*self.heard(parent), *messages)
            self.episode.replace(node, calls=calls, seconds=seconds, shown=heard)
            return node
        tokens_L = torch.tensor(added.tokens, dtype=torch.int64)
        return self.episode.add(
            Node(parent, tuple(messages), tokens_L, added.conversation, calls=calls, seconds=seconds)
        )

    def read(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """The node after which the next answer of this conversation is generated. What an agent sends is the whole
        history: recorded messages are found in it, others are added. Of answers that an agent cannot tell apart, the
        one whose reasoning and ids of calls it sends is taken, else the newest."""
        if messages[-1]["role"] == "assistant":
            raise DataError("the last message is the assistant's; an answer cannot be continued")
        nodes, wanted = self.episode.nodes, [comparable(message) for message in messages]
        found: dict[int, tuple[int, int]] = {}  # node -> (messages up to it, how many are equal in every detail)
        for index, node in enumerate(nodes):
            own = node.messages if node.shown is None else node.shown
            before = (0, 0) if node.parent is None else found.get(node.parent)
            if before is None or list(node.conversation.tools) != list(tools):
                continue
            sent = messages[before[0] : before[0] + len(own)]
            if own and [comparable(message) for message in own] == wanted[before[0] : before[0] + len(own)]:
                found[index] = before[0] + len(own), before[1] + sum(map(same_details, own, sent))
        # an answer that the conversation goes on from, or a node that the conversation ends with
        known = [index for index, (length, _) in found.items() if nodes[index].sampled or length == len(messages)]
        best = max(known, key=lambda index: (*found[index], index), default=None)
        if best is None:
            self.branched += bool(nodes)
            return self.begin(messages, tools)
        if not nodes[best].sampled:
            return best
        self.branched += any(node.parent == best for node in nodes)
        return self.add(best, messages[found[best][0] :])

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

    def answer(self, parent: int, completion: Completion, seconds: float = 0.0, stops: Sequence[str] = ()) -> int:
        """An answer of the policy. Returns its node.

        `stops`: texts that end an answer. The tokens behind the first one are dropped: the rest is what an engine that
        ends there samples.
        """
        stopped = self.stopped(completion, stops)
        completion = stopped or completion
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
                finished=completion.finished or stopped is not None,
                stop=self.texts.stop_texts[tokens[-1]] if completion.finished else "",
                seconds=seconds,
                experts_PMK=completion.experts_LMK,
            )
        )

    def stopped(self, completion: Completion, stops: Sequence[str]) -> Completion | None:
        """The completion up to the token with which one of the texts is complete. None: there is none."""
        if not stops:
            return None
        tokens: list[int] = completion.tokens_L.tolist()

        def is_complete(length: int) -> bool:
            text = self.texts.decode(tokens[:length])
            return any(stop in text for stop in stops)

        if not is_complete(len(tokens)):
            return None
        length = bisect_left(range(len(tokens)), True, key=is_complete)
        experts_LMK = completion.experts_LMK
        return replace(
            completion,
            tokens_L=completion.tokens_L[:length],
            logprobs_L=completion.logprobs_L[:length],
            finished=False,
            experts_LMK=None if experts_LMK is None else experts_LMK[: len(experts_LMK) - len(tokens) + length],
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
            found += node.messages if node.shown is None else node.shown
        return found


def comparable(message: Message) -> tuple[Any, ...]:
    """What identifies a message. Clients leave out reasoning and empty fields, and write arguments of calls with other
    spaces."""
    text: str = message.get("content") or ""
    if message.get("role") == "assistant":
        text = split_reasoning(text)[1]
    calls = [(call["function"]["name"], parsed(call["function"]["arguments"])) for call in calls_of(message)]
    return message.get("role"), text.strip(), calls, message.get("tool_call_id")


def same_details(one: Message, other: Message) -> bool:
    """Of messages that are comparable."""
    same_ids = [call.get("id") for call in calls_of(one)] == [call.get("id") for call in calls_of(other)]
    return same_ids and (one.get("reasoning_content") or "") == (other.get("reasoning_content") or "")


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
