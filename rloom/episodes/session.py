"""An episode whose agent asks for its answers: over HTTP (the gateway), or with tokens (an agent loop).

The agent sends the whole history with every request. What of it is recorded already is found, and the answer is
generated after the recorded tokens.
"""

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rloom.episodes.base import ToolSchema
from rloom.episodes.episode import Node
from rloom.episodes.runner import LimitReached, RunningEpisode
from rloom.episodes.tool_calls import parse_tool_calls, without_calls
from rloom.types import Message


@dataclass(frozen=True)
class AgentAnswer:
    """An answer, as an agent receives it."""

    id: str  # `set_reward` names it
    node: Node
    prompt_tokens: int

    @property
    def message(self) -> Message:
        assert self.node.shown is not None
        return self.node.shown


class AgentSession:
    """One episode. `id` is a part of the agent's address, `key` its API key: either names the session."""

    def __init__(self, run: RunningEpisode) -> None:
        self.run = run
        self.id, self.key = secrets.token_hex(8), f"rloom-{secrets.token_hex(16)}"
        self.nodes: dict[str, int] = {}  # id of an answer -> its node
        self.closed = False

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), max_tokens: int | None = None
    ) -> AgentAnswer:
        """DataError: the messages cannot be answered. LimitReached: no further answer is possible."""
        run, writer = self.run, self.run.writer
        leaf = writer.read(messages, tools)
        try:
            node = await run.answer(leaf, max_tokens)
        except LimitReached as reached:
            run.ending = reached.ending
            if reached.answer is None:
                raise
            node = reached.answer
        name = f"{self.id}-{node}"
        self.nodes[name] = node
        writer.episode.replace(node, shown=shown_message(writer.text(node), name))
        answer = writer.episode.nodes[node]
        return AgentAnswer(name, answer, len(writer.episode.tokens(leaf)))

    def set_reward(self, reward: float, answer: str | None = None) -> None:
        """Of the episode; or of one answer, placed at its last token. KeyError: there is no such answer."""
        if answer is None:
            self.run.reward = reward
        else:
            self.run.writer.episode.replace(self.nodes[answer], reward=reward)


def shown_message(text: str, answer: str) -> Message:
    """OpenAI's form: the calls of tools are apart from the text."""
    calls = [call for call in parse_tool_calls(text) if call.error is None]
    if not calls:
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": without_calls(text),
        "tool_calls": [
            {
                "id": f"call_{answer}-{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ],
    }


@dataclass
class Sessions:
    """The sessions of running episodes."""

    by_id: dict[str, AgentSession] = field(default_factory=dict)
    by_key: dict[str, AgentSession] = field(default_factory=dict)

    @contextmanager
    def open(self, run: RunningEpisode) -> Iterator[AgentSession]:
        """Requests that arrive after the end are refused."""
        session = AgentSession(run)
        self.by_id[session.id] = self.by_key[session.key] = session
        try:
            yield session
        finally:
            session.closed = True
            del self.by_id[session.id], self.by_key[session.key]

    def find(self, id: str | None, key: str | None) -> AgentSession | None:
        """By the address, else by the key."""
        return self.by_id.get(id) if id is not None else self.by_key.get(key or "")
