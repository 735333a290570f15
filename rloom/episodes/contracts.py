"""Users' classes and functions as environments.

| what the user gives | serves as |
| --- | --- |
| a class with `reset(**row)` whose other public methods are tools | `ToolEnvironment` |
| plain functions | `ToolEnvironment` without a reset |
| a class with `step(text)` and `reset` or `init` | `TextEnvironment` |
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rloom.episodes.base import Limits, Observation, ToolCall, ToolSchema, cut
from rloom.episodes.schema import tool_schema
from rloom.episodes.tool_calls import ParsedCall, parse_tool_calls
from rloom.types import Message, plain_text

NOT_TOOLS = ("reset", "get_reward", "close")


class ToolEnvironment:
    """Tools that the policy calls. An answer without a call ends the episode."""

    def __init__(self, instance: object | None, tools: Mapping[str, Callable[..., Any]], limits: Limits) -> None:
        self.instance, self.functions, self.limits = instance, tools, limits

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return tuple(map(tool_schema, self.functions.values()))

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        reset = getattr(self.instance, "reset", None)
        said = None if reset is None else call(reset, **row)
        if not said:
            return tuple(messages)
        *before, last = messages
        return (*before, {**last, "content": f"{last['content']}{said}"})

    def act(self, text: str) -> Observation:
        requested = parse_tool_calls(text)
        if not requested:
            return Observation(done=True)
        calls = tuple(map(self.run, requested[: self.limits.parallel_calls]))
        messages = tuple({"role": "tool", "name": one.name, "content": one.result} for one in calls)
        return Observation(messages, calls=calls)

    def run(self, requested: ParsedCall) -> ToolCall:
        start_s = time.monotonic()
        arguments = requested.arguments if isinstance(requested.arguments, str) else json.dumps(requested.arguments)
        error = requested.error
        if error is None and requested.name not in self.functions:
            error = f"there is no tool {requested.name!r}; the tools are {', '.join(self.functions)}"
        result = ""
        if error is None:
            try:
                result = plain_text(str(call(self.functions[requested.name], **requested.arguments)))
            except Exception as raised:  # of the user's code, or its time limit: the policy reads it
                error = f"{type(raised).__name__}: {raised}"
        shown = f"Error: {error}" if error is not None else result
        shown = cut(shown, self.limits.result_characters, self.limits.truncate_side)
        return ToolCall(requested.name, arguments, shown, time.monotonic() - start_s, error)

    def end(self) -> float | None:
        get_reward = getattr(self.instance, "get_reward", None)
        return None if get_reward is None else float(call(get_reward))

    def close(self) -> None:
        if (close := getattr(self.instance, "close", None)) is not None:
            call(close)


class TextEnvironment:
    """An environment that reads the policy's text and answers in text."""

    tools: tuple[ToolSchema, ...] = ()

    def __init__(self, instance: Any, limits: Limits) -> None:
        self.instance, self.limits, self.total = instance, limits, 0.0
        self.rewarded = False

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        said = call(self.instance.reset, **row)
        if not said:
            return tuple(messages)
        if isinstance(said, str):
            *before, last = messages
            return (*before, {**last, "content": f"{last['content']}{said}"})
        return tuple(said)

    def act(self, text: str) -> Observation:
        found = call(self.instance.step, text)
        said, reward, done = (
            (found["observation"], found.get("reward"), found["done"]) if isinstance(found, Mapping) else found[:3]
        )
        messages = said_messages(said, self.limits)
        return Observation(messages, None if reward is None else float(reward), bool(done))

    def end(self) -> float | None:
        return None

    def close(self) -> None:
        if (close := getattr(self.instance, "close", None)) is not None:
            call(close)


def said_messages(said: Any, limits: Limits) -> tuple[Message, ...]:
    if not said:
        return ()
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    return tuple(
        {**one, "content": plain_text(cut(str(one["content"]), limits.result_characters, limits.truncate_side))}
        for one in said
    )


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Functions may be coroutines."""
    found = function(*arguments, **named)
    return asyncio.run(awaited(found)) if inspect.isawaitable(found) else found


async def awaited(found: Awaitable[Any]) -> Any:
    return await found


def make_environment(made: Any, kwargs: Mapping[str, Any], limits: Limits) -> ToolEnvironment | TextEnvironment:
    """`made`: the user's class, factory, or list of functions."""
    if isinstance(made, Sequence):
        return ToolEnvironment(None, {function.__name__: function for function in made}, limits)
    instance = made(**kwargs)
    if hasattr(instance, "step"):
        return TextEnvironment(instance, limits)
    tools = {
        name: method
        for name, method in inspect.getmembers(instance, inspect.ismethod)
        if not name.startswith("_") and name not in NOT_TOOLS
    }
    return ToolEnvironment(instance, tools, limits)
