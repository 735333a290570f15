"""Records one episode: where a conversation goes on from what is recorded, and what is added to it."""

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rloom.episodes.base import ToolSchema
from rloom.episodes.episode import Episode, Node
from rloom.episodes.template import RenderedConversation, TurnTemplate
from rloom.episodes.tool_calls import split_reasoning
from rloom.errors import DataError
from rloom.rollout.base import Completion
from rloom.types import Message


@dataclass(frozen=True)
class Texts:
    """Between tokens and text, as the model has it."""

    template: TurnTemplate
    decode: Callable[[Sequence[int]], str]  # without special tokens
    stop_texts: Mapping[int, str]  # stop token -> its text
    decode_marked: Callable[[Sequence[int]], str] | None = None  # with the special tokens that the chat template writes


@dataclass
class EpisodeWriter:
    texts: Texts
    episode: Episode = field(default_factory=Episode)
    rewritten: int = 0  # times the chat template wrote the past in another way, which began a branch
    branched: int = 0  # times an agent changed its history, which began a branch
    # called with (parent, tokens) before messages are added; it raises an error if no answer may follow them
    check: Callable[[int | None, int], object] = lambda parent, tokens: None
    compared: dict[int, list[Any]] = field(default_factory=dict)  # node -> what identifies its messages

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """A branch from its first message. Returns the node."""
        added = self.texts.template.start(messages, tools)
        return self.add_tokens(None, messages, added.tokens, added.conversation)

    def add(self, parent: int, messages: Sequence[Message], seconds: float = 0.0) -> int:
        """Messages after an answer. Returns the node, which begins a branch if the template rewrites the past."""
        past = self.episode.nodes[parent]
        added = self.texts.template.add(past.conversation, messages, past.stop)
        if added is None:
            node = self.begin([*past.conversation.messages, *messages], past.conversation.tools)
            self.rewritten += 1
            heard = (*self.heard(parent), *messages)
            self.episode.replace(node, rewritten=True, seconds=seconds, shown=heard)
            return node
        return self.add_tokens(parent, messages, added.tokens, added.conversation, seconds)

    def add_tokens(
        self,
        parent: int | None,
        messages: Sequence[Message],
        tokens: Sequence[int],
        conversation: RenderedConversation,
        seconds: float = 0.0,
    ) -> int:
        """Messages that were not sampled. Returns the node. What `check` refuses leaves nothing behind."""
        self.check(parent, len(tokens))
        tokens_L = torch.tensor(tokens, dtype=torch.int64)
        return self.episode.add(Node(parent, tuple(messages), tokens_L, conversation, seconds=seconds))

    def read(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
        """The node after which the next answer of this conversation is generated. What an agent sends is the whole
        history: recorded messages are found in it, others are added. Of answers that an agent cannot tell apart, the
        one whose reasoning and ids of calls it sends is taken, else the newest."""
        if messages[-1]["role"] == "assistant":
            raise DataError("the last message is the assistant's; an answer cannot be continued")
        nodes, wanted = self.episode.nodes, [comparable(message) for message in messages]
        found: dict[int, tuple[int, int]] = {}  # node -> (messages up to it, how many are equal in every detail)
        for index, node in enumerate(nodes):
            before = found.get(node.parent) if node.parent is not None else (0, 0)
            if before is None or (node.parent is None and list(node.conversation.tools) != list(tools)):
                continue
            own = node.messages if node.shown is None else node.shown
            if index not in self.compared:
                self.compared[index] = [comparable(message) for message in own]
            start, stop = before[0], before[0] + len(own)
            if own and self.compared[index] == wanted[start:stop]:
                found[index] = stop, before[1] + sum(map(same_details, own, messages[start:stop]))
        # an answer that the conversation goes on from, or a node that the conversation ends with
        known = [index for index, (length, _) in found.items() if nodes[index].sampled or length == len(messages)]
        best = max(known, key=lambda index: (*found[index], index), default=None)
        if best is None:
            begun = self.begin(messages, tools)
            self.branched += begun > 0
            return begun
        if not nodes[best].sampled:
            return best
        is_continued = any(node.parent == best for node in nodes)
        added = self.add(best, messages[found[best][0] :])
        self.branched += is_continued
        return added

    def read_tokens(self, tokens: Sequence[int]) -> int:
        """As `read`, for an agent that sends tokens."""
        given_L = torch.tensor(tokens, dtype=torch.int64)
        ends: dict[int, int] = {}  # of nodes whose path is the beginning of these tokens
        best, length = None, 0
        for index, node in enumerate(self.episode.nodes):
            start = 0 if node.parent is None else ends.get(node.parent)
            if start is None or not torch.equal(given_L[start : start + len(node.tokens_L)], node.tokens_L):
                continue
            end = ends[index] = start + len(node.tokens_L)
            if end > length and (node.sampled or end == len(tokens)):
                best, length = index, end
        if best is not None and length == len(tokens):
            return best
        nodes = self.episode.nodes
        begins = bool(nodes) if best is None else any(node.parent == best for node in nodes)
        added = self.add_tokens(best, (), tokens[length:], RenderedConversation((), (), ""))
        self.branched += begins
        return added

    def answer(
        self,
        parent: int,
        completion: Completion,
        seconds: float = 0.0,
        stopped: Completion | None = None,
        request: int = 0,
    ) -> int:
        """An answer of the policy. Returns its node.

        `stopped`: what of it is recorded, if a text or a token ended it. `request`: the number of the request.
        """
        completion = stopped or completion
        tokens: list[int] = completion.tokens_L.tolist()
        own = tokens[:-1] if completion.finished else tokens
        text = self.texts.decode(own)
        written = text if self.texts.decode_marked is None else self.texts.decode_marked(own)
        stop = self.texts.stop_texts[tokens[-1]] if completion.finished else ""
        before = self.episode.nodes[parent].conversation
        return self.episode.add(
            Node(
                parent,
                ({"role": "assistant", "content": text},),
                completion.tokens_L,
                self.texts.template.answered(before, written, stop),
                sampled=True,
                logprobs_L=completion.logprobs_L,
                version=completion.version,
                finished=completion.finished or stopped is not None,
                stop=stop,
                seconds=seconds,
                experts_PMK=completion.experts_LMK,
                request=request,
            )
        )

    def stopped(
        self, completion: Completion, stops: Sequence[re.Pattern[str]], tokens: Set[int] = frozenset()
    ) -> Completion | None:
        """The completion up to the token with which one of the texts is complete, or which is one of `tokens`. The
        tokens behind it are dropped: the rest is what an engine that ends there samples. None: there is no such place.
        """
        own: list[int] = completion.tokens_L.tolist()
        by_token = next((place + 1 for place, token in enumerate(own) if token in tokens), None)
        by_text = self.end_of_stop(own, stops)
        length = min((one for one in (by_token, by_text) if one is not None), default=None)
        is_whole = completion.finished and length == len(own)
        return None if length is None or is_whole else first_tokens(completion, length)

    def end_of_stop(self, tokens: list[int], stops: Sequence[re.Pattern[str]]) -> int | None:
        """The number of tokens with which one of the texts is complete."""
        if not stops:
            return None

        def is_complete(length: int) -> bool:
            text = self.texts.decode(tokens[:length])
            return any(stop.search(text) for stop in stops)

        if not is_complete(len(tokens)):
            return None
        return bisect_left(range(len(tokens)), True, key=is_complete)

    def marked_text(self, answer: int) -> str | None:
        """With special tokens, in which some models write calls; None: they change nothing."""
        if self.texts.decode_marked is None:
            return None
        node = self.episode.nodes[answer]
        tokens = node.tokens_L.tolist()
        marked = self.texts.decode_marked(tokens[:-1] if node.stop else tokens)
        return None if marked == self.text(answer) else marked

    def text(self, answer: int) -> str:
        return str(self.episode.nodes[answer].messages[0]["content"])

    def heard(self, leaf: int) -> list[Message]:
        """The messages up to this node, as an agent has them."""
        found: list[Message] = []
        for index in self.episode.path(leaf):
            node = self.episode.nodes[index]
            found += node.messages if node.shown is None else node.shown
        return found


def first_tokens(completion: Completion, length: int) -> Completion:
    experts_LMK = completion.experts_LMK
    kept = None if experts_LMK is None else experts_LMK[: len(experts_LMK) - len(completion.tokens_L) + length]
    return replace(
        completion,
        tokens_L=completion.tokens_L[:length],
        logprobs_L=completion.logprobs_L[:length],
        finished=False,
        experts_LMK=kept,
    )


def comparable(message: Message) -> tuple[Any, ...]:
    """What identifies a message. Clients leave out empty fields, of answers also the reasoning and outer white space,
    and write arguments of calls with other spaces."""
    text: str = message.get("content") or ""
    if message.get("role") == "assistant":
        text = split_reasoning(text)[1].strip()
    calls = [(call["function"]["name"], parsed(call["function"]["arguments"])) for call in calls_of(message)]
    return message.get("role"), text, calls, message.get("tool_call_id")


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
