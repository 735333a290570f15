"""Environments, as the episodes use them, and the messages between the driver and the processes they run in.

Imports no torch: the processes start in milliseconds.
driver → process: ("begin", row, messages), then ("act", text) for every answer, then ("end",), as pickles; after that
the process closes the environment and ends.
process → driver: one reply to each, as JSON: what comes from there may have been written by generated code, and a
pickle could run it here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from rloom.types import Message, ToolCall

ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}
BEGIN, ACT, END = "begin", "act", "end"
FORK, KILL = b"f", b"k"  # driver → server: with a connection; with four bytes of a process id
CLOSE_S = 2.0  # time limit of closing an environment whose episode was given up
AtLimit = Literal["score", "mask", "fail"]  # of an episode that ends at a limit: see `multi_turn.at_limit`


@dataclass(frozen=True)
class Observation:
    """What the environment answers to a turn of the policy."""

    messages: tuple[Message, ...] = ()  # added to the conversation
    reward: float | None = None  # for this turn
    done: bool = False
    calls: tuple[ToolCall, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Environment(Protocol):
    """One instance serves one episode. All methods run in a process of their own."""

    @property
    def tools(self) -> tuple[ToolSchema, ...]: ...

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages before the first answer. `row`: the columns of the data; `messages`: its prompt."""

    def act(self, text: str) -> Observation:
        """After an answer of the policy."""

    def end(self) -> float | None:
        """The reward of the whole episode; None: it gives none. Called once, whether or not the episode is done."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Of one episode. None: no limit."""

    response_tokens: int  # after the first prompt, sampled and added ones; of each branch
    prompt_tokens: int | None = None  # of the first prompt, with the tools and what the environment added to it
    turns: int | None = None  # answers of the policy
    user_turns: int | None = None  # answers of tools and of the environment
    turn_tokens: int | None = None
    result_characters: int | None = None  # of one tool's result
    truncate_side: str = "middle"  # where a result that is too long is cut: left, right or middle
    call_s: float = 60.0  # one call of a tool, or one step of the environment
    episode_s: float | None = None
    episode_tokens: int | None = None  # after the first prompt, sampled and added ones; of all branches together
    at_limit: AtLimit = "score"
    parallel_calls: int = 1


@dataclass(frozen=True)
class Setup:
    """What an environment is made of."""

    reference: str  # file.py:name or module:name
    kwargs: Mapping[str, Any]
    limits: Limits


def cut(text: str, limit: int | None, side: str) -> str:
    """At most `limit` characters of it. Example: cut("abcdefgh", 4, "middle") is "ab...(truncated)...gh"."""
    if limit is None or len(text) <= limit:
        return text
    if side == "left":
        return text[:limit] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[-limit:]
    half = limit // 2
    return text[:half] + "...(truncated)..." + text[-half:]
