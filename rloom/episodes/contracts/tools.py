"""Tools that the policy calls, from several sources, in one environment."""

import inspect
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rloom.episodes.base import EnvironmentReport, EpisodeLimits, Observation, ToolSchema, cut
from rloom.episodes.contracts.calls import (
    ToolResult,
    UserCalls,
    as_result,
    as_reward,
    blocks_text,
    is_blocks,
    plain_values,
    reset_arguments,
)
from rloom.episodes.rows import selected_tools
from rloom.episodes.schema import tool_schema
from rloom.episodes.tool_calls import AUTO, ParsedCall, parse_tool_calls
from rloom.episodes.user_errors import note_tool_error, type_and_text
from rloom.errors import ConfigError
from rloom.types import Message, ToolCall, plain_text

if TYPE_CHECKING:
    from rloom.episodes.contracts.verl import Interaction

SCORES = "get_reward"
NOT_TOOLS = ("reset", SCORES, "close")


@dataclass(frozen=True)
class Tool:
    schema: ToolSchema
    function: Callable[..., Any]  # called with the arguments of the call; may be a coroutine function
    read: Callable[[Any], ToolResult] = as_result  # of what it returned
    gives_reward: bool = False  # what it returned may have one
    result_characters: int | None = None  # where the limits have none

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)


class Toolset(ABC):
    """Tools of one source, for one episode. `calls` runs a user's code. The methods with a body are those of tools
    without a state."""

    gives_reward: bool = False  # the tools or their end may have one
    asks_at_end: bool = False  # `reward` calls a user's code

    def begin(self, calls: UserCalls, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages before the first answer."""
        return tuple(messages)

    @abstractmethod
    def tools(self) -> Sequence[Tool]: ...

    def reward(self, calls: UserCalls) -> float | None:
        """At the end; None: it gives none."""
        return None

    def report(self) -> EnvironmentReport:
        return EnvironmentReport()

    def close(self, calls: UserCalls) -> None:
        return


class ToolEnvironment:
    """An answer without a call ends the episode, unless something answers in place of a user."""

    def __init__(
        self,
        toolsets: Sequence[Toolset],
        limits: EpisodeLimits,
        call_format: str = AUTO,
        user: "Interaction | None" = None,
    ) -> None:
        self.toolsets, self.limits, self.call_format, self.user = toolsets, limits, call_format, user
        self.calls = UserCalls(limits.call_s)
        self.by_name = named([tool for toolset in toolsets for tool in toolset.tools()])
        self.messages: list[Message] = []

    @property
    def gives_reward(self) -> bool:
        return self.user is not None or any(toolset.gives_reward for toolset in self.toolsets)

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return tuple(tool.schema for tool in self.by_name.values())

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        found = tuple(messages)
        for toolset in self.toolsets:
            found = toolset.begin(self.calls, row, found)
        chosen = selected_tools(row)
        if chosen is not None:
            self.by_name = {name: self.by_name[name] for name in check_names(chosen, self.by_name)}
        if self.user is not None:
            self.user.begin(self.calls, row)
        self.messages = list(found)
        return found

    def act(self, text: str, marked: str | None = None) -> Observation:
        self.messages.append({"role": "assistant", "content": text})
        requested = parse_tool_calls(text if marked is None else marked, self.call_format, self.tools)
        if not requested:
            seen = Observation(done=True) if self.user is None else self.user.answer(self.calls, self.messages)
        else:
            seen = self.run_all(requested[: self.limits.parallel_calls])
        self.messages.extend(seen.messages)
        return seen

    def run_all(self, requested: Sequence[ParsedCall]) -> Observation:
        """Coroutines that follow each other run at the same time, other functions one after the other."""
        done: list[tuple[ToolCall, float | None]] = []
        for together, group in groupby(requested, key=self.runs_together):
            calls = list(group)
            done += self.run_together(calls) if together and len(calls) > 1 else map(self.run, calls)
        rewards = [reward for _, reward in done if reward is not None]
        return Observation(
            tuple({"role": "tool", "name": one.name, "content": one.result} for one, _ in done),
            reward=sum(rewards) if rewards else None,
            calls=tuple(one for one, _ in done),
        )

    def runs_together(self, requested: ParsedCall) -> bool:
        tool = self.by_name.get(requested.name)
        return tool is not None and requested.error is None and tool.is_async

    def run(self, requested: ParsedCall) -> tuple[ToolCall, float | None]:
        began, error = time.monotonic(), requested.error
        if error is None and requested.name not in self.by_name:
            error = f"there is no tool {requested.name!r}; the tools are {', '.join(self.by_name)}"
        if error is not None:
            return self.called(requested, error, began)
        try:
            tool = self.by_name[requested.name]
            found = tool.read(self.calls(tool.function, **requested.arguments))
        except (Exception, SystemExit) as raised:  # of the user's code, or its time limit; argparse exits
            return self.called(requested, raised, began)
        return self.called(requested, found, began)

    def run_together(self, requested: Sequence[ParsedCall]) -> list[tuple[ToolCall, float | None]]:
        began, seconds = time.monotonic(), [0.0] * len(requested)

        async def one(index: int, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
            try:
                return tool.read(await tool.function(**arguments))
            except SystemExit as error:  # would end the event loop
                raise RuntimeError(f"it called exit({error.code})") from error
            finally:
                seconds[index] = time.monotonic() - began

        found = self.calls.together(
            [
                lambda index=index, call=call: one(index, self.by_name[call.name], call.arguments)  # type: ignore[misc]
                for index, call in enumerate(requested)
            ]
        )
        return [
            self.called(call, result, began, took) for call, result, took in zip(requested, found, seconds, strict=True)
        ]

    def called(
        self, requested: ParsedCall, found: ToolResult | BaseException | str, began: float, seconds: float | None = None
    ) -> tuple[ToolCall, float | None]:
        """`found`: a text says why the call could not be made. Raises the error of a tool if those fail the episode."""
        error = found if isinstance(found, str) else None
        if isinstance(found, BaseException):
            error = type_and_text(found)
            if self.limits.tool_error == "fail":
                raise ToolFailed(f"the tool {requested.name}: {error}") from found
            note_tool_error(found, requested.name)
        text = found.text if isinstance(found, ToolResult) else f"Error: {error}"
        reward = found.reward if isinstance(found, ToolResult) else None
        arguments = requested.arguments if isinstance(requested.arguments, str) else json.dumps(requested.arguments)
        took = time.monotonic() - began if seconds is None else seconds
        error = None if error is None else plain_text(error[:500])
        return ToolCall(requested.name, arguments, self.shortened(requested.name, text), took, error), reward

    def shortened(self, name: str, text: str) -> str:
        """A result of this tool, as the policy reads it."""
        limit = self.limits.result_characters
        if limit is None and name in self.by_name:
            limit = self.by_name[name].result_characters
        return plain_text(cut(text, limit, self.limits.truncate_side))

    def end(self) -> float | None:
        rewards = [toolset.reward(self.calls) for toolset in self.toolsets]
        given = [reward for reward in rewards if reward is not None]
        return sum(given) if given or self.gives_reward_by_calls else None

    @property
    def gives_reward_by_calls(self) -> bool:
        return self.user is not None or any(tool.gives_reward for tool in self.by_name.values())

    @property
    def reward_of_steps(self) -> float | None:
        asks = any(toolset.asks_at_end for toolset in self.toolsets)
        return 0.0 if self.gives_reward_by_calls and not asks else None

    def report(self) -> EnvironmentReport:
        parts = [toolset.report() for toolset in self.toolsets] + ([self.user.report()] if self.user else [])
        return EnvironmentReport(
            facts={name: value for part in parts for name, value in part.facts.items()},
            state={name: value for part in parts for name, value in part.state.items()},
            metrics={name: value for part in parts for name, value in part.metrics.items()},
        )

    def close(self) -> None:
        with ExitStack() as stack:  # each is closed, also if another one fails
            stack.callback(self.calls.close)
            if self.user is not None:
                stack.callback(self.user.close, self.calls)
            for toolset in self.toolsets:
                stack.callback(toolset.close, self.calls)


class ToolFailed(Exception):
    """A tool failed, and the episode with it."""


def named(tools: Sequence[Tool]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            raise ConfigError(f"two tools have the name {tool.name}; rename or leave out one of them")
        found[tool.name] = tool
    return found


def check_names(chosen: Sequence[str], tools: Mapping[str, Tool]) -> Sequence[str]:
    for name in chosen:
        if name not in tools:
            raise ValueError(f"extra_info.tool_selection has {name!r}; the tools are {', '.join(tools)}")
    return chosen


class FunctionTools(Toolset):
    """Functions without a state."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.given = tools
        self.gives_reward = any(tool.gives_reward for tool in tools)

    @classmethod
    def of(cls, functions: Sequence[Callable[..., Any]]) -> "FunctionTools":
        return cls([Tool(tool_schema(function), function) for function in functions])

    def tools(self) -> Sequence[Tool]:
        return self.given


class MethodTools(Toolset):
    """The public methods of an instance, as TRL has it: `reset(**row)` begins, `get_reward()` scores."""

    def __init__(self, instance: Any, seed: int = 0) -> None:
        self.instance, self.seed = instance, seed
        self.gives_reward = self.asks_at_end = callable(getattr(instance, SCORES, None))

    def begin(self, calls: UserCalls, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        reset = getattr(self.instance, "reset", None)
        return begun(messages, None if reset is None else calls(reset, **reset_arguments(reset, row, self.seed)))

    def tools(self) -> Sequence[Tool]:
        return [Tool(tool_schema(method), method) for method in public_methods(self.instance).values()]

    def reward(self, calls: UserCalls) -> float | None:
        get_reward = getattr(self.instance, SCORES, None)
        return None if get_reward is None else as_reward(calls(get_reward), SCORES)

    def report(self) -> EnvironmentReport:
        return EnvironmentReport(state=plain_values(getattr(self.instance, "__dict__", {})))

    def close(self, calls: UserCalls) -> None:
        close(calls, self.instance)


def public_methods(instance: object) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in inspect.getmembers(instance, inspect.ismethod)
        if not name.startswith("_") and name not in NOT_TOOLS
    }


def begun(messages: Sequence[Message], seen: Any) -> tuple[Message, ...]:
    """The prompt with what a reset returned: a text, or blocks of text, is added to the last message; messages replace
    all."""
    if seen is None or seen == "" or seen == []:
        return tuple(messages)
    if is_blocks(seen):
        seen = blocks_text(seen)
    if isinstance(seen, str):
        return (*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{seen}"})
    if isinstance(seen, Sequence) and all(
        isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in seen
    ):
        return tuple(dict(one) for one in seen)
    raise TypeError(f"reset returned {type(seen).__name__}; return None, a text, or messages with role and content")


def close(calls: UserCalls, instance: Any) -> None:
    if (method := getattr(instance, "close", None)) is not None:
        calls(method)
