"""Users' classes and functions as environments.

| what the user gives | known from | served by |
| --- | --- | --- |
| functions; or a class with tools as public methods, `reset(**row)`, `get_reward()` | TRL | ToolEnvironment |
| a class with `reset(**row)` and `step(text)` -> (observation, reward, done) | Gymnasium | TextEnvironment |
| a class with `init(prompt)` and `step(text)` -> {"observations", "reward", "done"} | SkyRL | TextEnvironment |
| a class with `reset(states)` and `step(states)` -> {"environment_feedback", ...} | OpenRLHF | StatesEnvironment |
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rloom.episodes.base import Environment, Limits, Observation, ToolSchema, cut
from rloom.episodes.schema import tool_schema
from rloom.episodes.tool_calls import ParsedCall, parse_tool_calls
from rloom.errors import ConfigError
from rloom.types import Message, ToolCall, plain_text

NOT_TOOLS = ("reset", "get_reward", "close")


def make_environment(given: Any, kwargs: Mapping[str, Any], limits: Limits) -> Environment:
    """`given`: the user's class or another function that returns an instance, or a list of functions."""
    if isinstance(given, Sequence):
        return ToolEnvironment(None, {function.__name__: function for function in given}, limits)
    instance = given(**kwargs)
    if not hasattr(instance, "step"):
        return ToolEnvironment(instance, public_methods(instance), limits)
    if "states" in inspect.signature(instance.step).parameters:
        return StatesEnvironment(instance, limits)
    return TextEnvironment(instance, limits)


def public_methods(instance: object) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        name: method
        for name, method in inspect.getmembers(instance, inspect.ismethod)
        if not name.startswith("_") and name not in NOT_TOOLS
    }
    if not found:
        raise ConfigError(
            f"the environment {type(instance).__name__} has no `step` and no public method that could be a tool; "
            "write one of them"
        )
    return found


class ToolEnvironment:
    """Tools that the policy calls. An answer without a call ends the episode."""

    def __init__(self, instance: Any, tools: Mapping[str, Callable[..., Any]], limits: Limits) -> None:
        self.instance, self.functions, self.limits = instance, tools, limits

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return tuple(map(tool_schema, self.functions.values()))

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        reset = getattr(self.instance, "reset", None)
        return begun(messages, None if reset is None else call(reset, **row))

    def act(self, text: str) -> Observation:
        requested = parse_tool_calls(text)
        if not requested:
            return Observation(done=True)
        calls = tuple(map(self.run, requested[: self.limits.parallel_calls]))
        return Observation(
            tuple({"role": "tool", "name": one.name, "content": one.result} for one in calls), calls=calls
        )

    def run(self, requested: ParsedCall) -> ToolCall:
        start_s, result, error = time.monotonic(), "", requested.error
        arguments = requested.arguments if isinstance(requested.arguments, str) else json.dumps(requested.arguments)
        if error is None and requested.name not in self.functions:
            error = f"there is no tool {requested.name!r}; the tools are {', '.join(self.functions)}"
        if error is None:
            try:
                result = str(call(self.functions[requested.name], **requested.arguments))
            except Exception as raised:  # of the user's code, or its time limit: the policy reads it
                error = f"{type(raised).__name__}: {raised}"
        shown = shortened(result if error is None else f"Error: {error}", self.limits)
        return ToolCall(requested.name, arguments, shown, time.monotonic() - start_s, error)

    def end(self) -> float | None:
        get_reward = getattr(self.instance, "get_reward", None)
        return None if get_reward is None else as_reward(call(get_reward))

    def close(self) -> None:
        close(self.instance)


class TextEnvironment:
    """An environment that reads the policy's text and answers in text."""

    tools: tuple[ToolSchema, ...] = ()

    def __init__(self, instance: Any, limits: Limits) -> None:
        self.instance, self.limits = instance, limits

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        if hasattr(self.instance, "init"):
            found = call(self.instance.init, [dict(message) for message in messages])
            return tuple(found[0])
        found = call(self.instance.reset, **row)
        return begun(messages, found[0] if isinstance(found, tuple) else found)  # Gymnasium: (observation, info)

    def act(self, text: str) -> Observation:
        found = call(self.instance.step, text)
        if isinstance(found, Mapping):
            seen, reward, done = found.get("observations", found.get("observation")), found.get("reward"), found["done"]
        elif len(found) == 5:  # Gymnasium: the fourth says that the episode was cut short
            seen, reward, done = found[0], found[1], found[2] or found[3]
        else:
            seen, reward, done = found
        return Observation(as_messages(seen, self.limits), as_reward(reward), bool(done))

    def end(self) -> float | None:
        return 0.0  # beyond the rewards of the steps, of which there may be none

    def close(self) -> None:
        close(self.instance)


class StatesEnvironment:
    """An environment whose methods take and return dictionaries, and whose feedback is added without a template."""

    tools: tuple[ToolSchema, ...] = ()

    def __init__(self, instance: Any, limits: Limits) -> None:
        self.instance, self.limits, self.label, self.seen = instance, limits, None, ""

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        self.label = row.get("label")
        states = {"observation": messages[-1]["content"], "label": self.label}
        found = call(self.instance.reset, states)
        self.seen = str(found["observation"])
        return (*messages[:-1], {**messages[-1], "content": self.seen})

    def act(self, text: str) -> Observation:
        states = {"observation_text": self.seen, "action_text": text, "label": self.label, "sampling_params": None}
        found = call(self.instance.step, states)
        feedback = shortened(str(found.get("environment_feedback", "")), self.limits)
        self.seen += text + feedback
        messages = ({"role": "user", "content": feedback},) if feedback else ()
        return Observation(messages, as_reward(found.get("rewards")), bool(found["done"]))

    def end(self) -> float | None:
        return 0.0

    def close(self) -> None:
        close(self.instance)


def begun(messages: Sequence[Message], seen: Any) -> tuple[Message, ...]:
    """The prompt with what a reset returned: a text is added to the last message, messages replace all."""
    if not seen:
        return tuple(messages)
    if not isinstance(seen, str):
        return tuple(seen)
    return (*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{seen}"})


def as_messages(seen: Any, limits: Limits) -> tuple[Message, ...]:
    """A text is a message of the user."""
    found = [{"role": "user", "content": seen}] if isinstance(seen, str) else seen or []
    return tuple({**one, "content": shortened(str(one["content"]), limits)} for one in found if one["content"])


def as_reward(found: Any) -> float | None:
    """A number, or what has one, such as a tensor or an array."""
    if found is None:
        return None
    return float(found.item() if hasattr(found, "item") else found)


def shortened(text: str, limits: Limits) -> str:
    return plain_text(cut(text, limits.result_characters, limits.truncate_side))


def close(instance: Any) -> None:
    if (method := getattr(instance, "close", None)) is not None:
        call(method)


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The function may be a coroutine."""
    found = function(*arguments, **named)
    return asyncio.run(result_of(found)) if inspect.isawaitable(found) else found


async def result_of(found: Awaitable[Any]) -> Any:
    return await found
