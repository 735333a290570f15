"""Environments, as the episodes use them, and the messages between the driver and the processes they run in.

Imports no torch: the processes start in milliseconds.
driver → process: (number, "begin", row, messages, seed), then (number, "act", text, marked) for every answer, then
(number, "end"), as pickles; after that the process closes the environment and ends.
process → driver: one reply to each, as JSON: what comes from there may have been written by generated code, and a
pickle could run it here. It repeats the request's number, which is drawn: no reply can be written before its request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.kinds import ENVIRONMENT_KEY
from rloom.types import Message, ToolCall

ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}
BEGIN, ACT, END = "begin", "act", "end"
NUMBER, ERRORS = "number", "errors"  # in a reply: that of its request; errors for the output, by their place
# driver → server: FORK with a connection and the number of the request, which the answer repeats before the process id;
# KILL with a process id
FORK, KILL = b"f", b"k"
COMMAND_BYTES = 4  # of a number and of a process id
NO_PROCESS = 0  # in place of a process id: it cannot be forked
CLOSE_S = 2.0  # time limit of closing an environment whose episode was given up
# variables with keys that rloom uses, which a user's code does not get: a tool may run what the policy wrote
WITHHELD = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")
VERL_RESULT_CHARACTERS = 256  # verl's default of `max_tool_response_length`
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


@dataclass(frozen=True)
class EnvironmentReport:
    """What an environment tells at the end, beside the reward."""

    facts: Mapping[str, Any] = field(default_factory=dict)  # for reward functions, in `extra_info`
    state: Mapping[str, Any] = field(default_factory=dict)  # its plain attributes, for TRL's argument `environments`
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One instance serves one episode. All methods run in a process of their own, and call a user's code within its
    time limit."""

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """Of this episode, once it has begun."""

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages before the first answer. `row`: the columns of the data; `messages`: its prompt."""

    def act(self, text: str, marked: str | None = None) -> Observation:
        """After an answer of the policy. `marked`: with its special tokens, if it has some: calls may have them."""

    def end(self) -> float | None:
        """The reward of the whole episode; None: it gives none. Called once, whether or not the episode is done."""

    def report(self) -> EnvironmentReport:
        """After the end."""

    def close(self) -> None: ...

    @property
    def reward_of_steps(self) -> float | None:
        """What `end` returns, where it calls no code of the user. None: it calls some, or the reward is none."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Of one episode. None: no limit."""

    response_tokens: int  # after the first prompt, sampled and added ones; of each branch
    prompt_tokens: int | None = None  # of the first prompt, with the tools and what the environment added to it
    total_tokens: int | None = None  # of the first prompt and what follows; of each branch
    turns: int | None = None  # answers of the policy
    user_turns: int | None = None  # answers of tools and of the environment
    turn_tokens: int | None = None
    result_characters: int | None = None  # of one tool's result; None: as `Tool` says
    truncate_side: str = "middle"  # where a result that is too long is cut: left, right or middle
    call_s: float = 60.0  # one call of a tool, or one step of the environment
    episode_s: float | None = None
    episode_tokens: int | None = None  # after the first prompt, sampled and added ones; of all branches together
    at_limit: AtLimit = "score"
    parallel_calls: int = 1  # calls of tools that are run in one turn
    tool_error: str = "text"  # a tool that fails: the policy reads the error (text), or the episode fails (fail)


@dataclass(frozen=True)
class EnvironmentSetup:
    """What environments are made of."""

    reference: str | None  # file.py:name or module:name of an environment
    kwargs: Mapping[str, Any]
    limits: EpisodeLimits
    function_tool_path: str | None = None
    tool_config_path: str | None = None
    interaction_config_path: str | None = None
    objects: bytes | None = None  # the calling program's own environment and tools, pickled
    call_format: str = "auto"  # of tool calls
    name: str | None = None  # of the environment, as the configuration has it
    withheld: tuple[str, ...] = WITHHELD  # variables that its processes do not get

    noun, plural, kwargs_key = "environment", "environments", f"{MULTI_TURN}.environment_kwargs"  # in sentences

    @property
    def key(self) -> str:
        """What selects the user's code, in sentences."""
        given = {
            ENVIRONMENT_KEY: self.name or self.reference,
            "environment, tools": "..." if self.objects is not None else None,
            f"{MULTI_TURN}.function_tool_path": self.function_tool_path,
            f"{MULTI_TURN}.tool_config_path": self.tool_config_path,
            f"{MULTI_TURN}.interaction_config_path": self.interaction_config_path,
        }
        return " and ".join(f"{key}={value}" for key, value in given.items() if value is not None)


def cut(text: str, limit: int | None, side: str) -> str:
    """At most `limit` characters of it. Example: cut("abcdefgh", 4, "middle") is "ab...(truncated)...gh"."""
    if limit is None or len(text) <= limit:
        return text
    if side == "left":
        return text[:limit] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[-limit:]
    half = limit // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
