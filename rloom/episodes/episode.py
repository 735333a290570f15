"""What happened in one episode: a graph of messages with their tokens, and what of it is trained.

A node is a message; its parent is the message before it. An episode without a rewritten past is one line of nodes.
Where the past is written in another way (by the chat template, or by an agent that shortens its history), a new branch
begins. Sampled tokens are stored as they were sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rloom.batch import Turn
from rloom.episodes.base import ToolCall
from rloom.types import Message


@dataclass(frozen=True)
class Node:
    """A message, or several of the environment that follow each other."""

    parent: int | None  # index in the episode
    messages: tuple[Message, ...]
    tokens_L: Tensor  # int64
    sampled: bool  # the policy generated these tokens
    logprobs_L: Tensor | None = None  # iff sampled
    version: int = 0  # of the weights, if sampled
    finished: bool = True  # if sampled: ended with a stop token
    calls: tuple[ToolCall, ...] = ()  # if not sampled: of the answer before
    reward: float | None = None  # if sampled: for this turn


@dataclass
class Episode:
    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def path(self, leaf: int) -> list[int]:
        """From the first message to this one."""
        found: list[int] = []
        index: int | None = leaf
        while index is not None:
            found.append(index)
            index = self.nodes[index].parent
        return found[::-1]

    @property
    def leaves(self) -> list[int]:
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def branches(self) -> "Iterator[Branch]":
        """Every path from the first message to a leaf. A sampled node on several paths is trained in the first.

        An episode that ended before the first answer is one branch without turns.
        """
        trained: set[int] = set()
        answered = any(node.sampled for node in self.nodes)
        for leaf in self.leaves:
            path = self.path(leaf)
            new = [index for index in path if self.nodes[index].sampled and index not in trained]
            if new or not answered:
                trained.update(new)
                yield Branch.of([self.nodes[index] for index in path], [index in new for index in path])


@dataclass(frozen=True)
class Branch:
    """One sample of the batch."""

    tokens_L: Tensor
    logprobs_L: Tensor  # 0 outside the turns
    turns: tuple[Turn, ...]
    rewards: tuple[tuple[int, float], ...]  # (index of the token, reward) of turns that have one
    finished: bool

    @classmethod
    def of(cls, nodes: Sequence[Node], trained: Sequence[bool]) -> "Branch":
        turns: list[Turn] = []
        rewards: list[tuple[int, float]] = []
        logprobs, start = list[Tensor](), 0
        for node, train in zip(nodes, trained, strict=True):
            stop = start + len(node.tokens_L)
            if train:
                turns.append(Turn(start, stop, node.version))
                if node.reward is not None:
                    rewards.append((stop - 1, node.reward))
            own = node.logprobs_L if train else None
            logprobs.append(torch.zeros(stop - start) if own is None else own)
            start = stop
        finished = next((node.finished for node in reversed(nodes) if node.sampled), False)
        tokens_L = torch.cat([node.tokens_L for node in nodes])
        return cls(tokens_L, torch.cat(logprobs), tuple(turns), tuple(rewards), finished)
