"""What happened in one episode: a graph of messages with their tokens, and what of it is trained.

A node is a message; its parent is the message before it. An episode without a rewritten past is one line of nodes.
Where the past is written in another way (by the chat template, or by an agent that shortens its history), a new branch
begins. Sampled tokens are stored as they were sampled.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rloom.batch import Turn
from rloom.episodes.template import RenderedConversation
from rloom.types import Message, ToolCall


@dataclass(frozen=True)
class Node:
    """A message, or several of the environment that follow each other."""

    parent: int | None  # index in the episode
    messages: tuple[Message, ...]
    tokens_L: Tensor  # int64
    conversation: RenderedConversation  # from the first message to this one
    sampled: bool = False  # the policy generated these tokens
    logprobs_L: Tensor | None = None  # iff sampled
    version: int = 0  # of the weights, if sampled
    finished: bool = True  # if sampled: ended with a stop token
    stop: str = ""  # the text of that token
    calls: tuple[ToolCall, ...] = ()  # if sampled: that it made
    reward: float | None = None  # if sampled: for this turn
    seconds: float = 0.0  # of generation, or of the environment
    rewritten: bool = False  # begins a branch: the chat template wrote the past in another way
    shown: tuple[Message, ...] | None = None  # the messages as an agent has them, if it has others
    experts_PMK: Tensor | None = None  # if sampled and routing is replayed: of all tokens of the path
    request: int = 0  # if sampled: the number of its request; answers may finish in another order


@dataclass
class Episode:
    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def replace(self, index: int, **changed: Any) -> None:
        self.nodes[index] = replace(self.nodes[index], **changed)

    @property
    def turns(self) -> list[int]:
        """The sampled nodes in the order of their requests."""
        sampled = [index for index, node in enumerate(self.nodes) if node.sampled]
        return sorted(sampled, key=lambda index: self.nodes[index].request)

    def answered(self, leaves: Iterable[int] = ()) -> set[int]:
        """The nodes before answers, the answers, and the paths to `leaves`."""
        found = {index for leaf in leaves for index in self.path(leaf)}
        for index in range(len(self.nodes) - 1, -1, -1):  # a node comes after its parent
            node = self.nodes[index]
            if node.sampled or index in found:
                found |= {index} if node.parent is None else {index, node.parent}
        return found

    def without_unanswered(self) -> "Episode":
        """Without messages that no answer follows: nothing of them is trained, and no reward reads them."""
        kept = sorted(self.answered())
        place = {index: number for number, index in enumerate(kept)}
        nodes = [self.nodes[index] for index in kept]
        return Episode([replace(node, parent=None if node.parent is None else place[node.parent]) for node in nodes])

    def tokens(self, leaf: int) -> list[int]:
        """Of the path to this node."""
        return [token for index in self.path(leaf) for token in self.nodes[index].tokens_L.tolist()]

    def path(self, leaf: int) -> list[int]:
        """From the first message to this one."""
        found: list[int] = []
        index: int | None = leaf
        while index is not None:
            found.append(index)
            index = self.nodes[index].parent
        return found[::-1]

    def requests(self, path: Sequence[int]) -> list[int]:
        """The numbers of the requests for the answers on a path. An agent loop's mask cuts an answer into several nodes
        of one request."""
        return list(dict.fromkeys(self.nodes[index].request for index in path if self.nodes[index].sampled))

    @property
    def leaves(self) -> list[int]:
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def branches(self) -> "Iterator[Branch]":
        """Every path from the first message to a last answer, in the order of their requests: answers to
        concurrent requests may finish in any order. A sampled node on several paths is trained in the first.

        An episode that ended before the first answer is one branch without turns.
        """
        trained: set[int] = set()
        answered = any(node.sampled for node in self.nodes)
        paths = map(self.path, self.leaves)
        for path in sorted(paths, key=self.requests):
            new = [index for index in path if self.nodes[index].sampled and index not in trained]
            if new or not answered:
                trained.update(new)
                yield self.branch(path, set(new))

    def branch(self, path: Sequence[int], trained: Set[int]) -> "Branch":
        turns: list[Turn] = []
        logprobs, start = list[Tensor](), 0
        finished, experts_LMK = False, None
        for index in path:
            node = self.nodes[index]
            stop = start + len(node.tokens_L)
            if index in trained:
                turns.append(Turn(start, stop, node.version))
            if node.sampled:
                finished, experts_LMK = node.finished, node.experts_PMK
            own = node.logprobs_L if index in trained else None
            logprobs.append(torch.zeros(stop - start) if own is None else own)
            start = stop
        tokens_L = torch.cat([self.nodes[index].tokens_L for index in path])
        own_turns = tuple(index for index in path if index in trained)
        return Branch(tokens_L, torch.cat(logprobs), tuple(turns), own_turns, finished, experts_LMK, tuple(path))


@dataclass(frozen=True)
class Branch:
    """One sample of the batch."""

    tokens_L: Tensor
    logprobs_L: Tensor  # 0 outside the turns
    turns: tuple[Turn, ...]
    trained: tuple[int, ...]  # nodes of the turns
    finished: bool
    experts_LMK: Tensor | None
    nodes: tuple[int, ...]  # of the episode, from its first message
