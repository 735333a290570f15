"""verl's tools and interactions: `@function_tool` files, classes of BaseTool and of BaseInteraction from YAML files.

In verl, a tool's instance is created and released around every call. Here it is created once at the beginning of an
episode and released once at its end, so that its state lives as long as the episode.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.base import VERL_RESULT_CHARACTERS, EnvironmentReport, Observation, ToolSchema
from rloom.episodes.contracts.calls import ToolResult, UserCalls, accepted, as_reward, as_text, numbers, plain_values
from rloom.episodes.contracts.tools import Tool, Toolset
from rloom.episodes.rows import extra_info, interaction_kwargs, selected_tools, tools_kwargs
from rloom.episodes.stand_ins import verl_tools
from rloom.errors import ConfigError
from rloom.import_path import add_folder_of
from rloom.plugins import load_file, load_listed, type_and_message
from rloom.types import Message, plain_text

NATIVE, MCP = "native", "mcp"  # values of `config.type`


@dataclass
class AgentData:
    """What a tool's `execute` receives as `agent_data`; it may keep things in `extra_fields`."""

    messages: list[Message]
    tools_kwargs: Mapping[str, Any]
    request_id: str = field(default_factory=lambda: uuid4().hex)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    image_data: None = None
    video_data: None = None


def function_tools(path: str) -> list[Tool]:
    """Of the functions that the file marks with @function_tool."""
    key = f"{MULTI_TURN}.function_tool_path"
    before = set(registered())
    load_file(key, path, path)
    found = [entry for name, entry in registered().items() if name not in before]
    if not found:
        raise ConfigError(f"{key}={path}: the file marks no function with @function_tool; mark those that are tools")
    return [
        Tool(schema_of(entry.tool_schema), entry.fn, function_result, True, VERL_RESULT_CHARACTERS) for entry in found
    ]


def registered() -> dict[str, Any]:
    """By verl's decorator, if it is installed, and by rloom's."""
    theirs = sys.modules.get("verl.tools.function_tool", verl_tools)
    return {**verl_tools.FUNCTION_TOOL_REGISTRY, **theirs.FUNCTION_TOOL_REGISTRY}


def function_result(found: Any) -> ToolResult:
    """A tuple is (response, reward, metrics), of which the last two may be left out."""
    if not isinstance(found, tuple):
        return ToolResult(as_text(found))
    if not 1 <= len(found) <= 3:
        raise TypeError(f"it returned a tuple of {len(found)} values; return (response, reward, metrics)")
    response, reward, metrics = (*found, None, None)[:3]
    return ToolResult(as_text(response), as_reward(reward, "the tool"), metrics)


def schema_of(given: Any) -> ToolSchema:
    """As chat templates take it."""
    if isinstance(given, Mapping):
        return given
    dumped: ToolSchema = given.model_dump(exclude_unset=True, exclude_none=True)
    return dumped


def read_yaml(key: str, path: str, section: str) -> list[Mapping[str, Any]]:
    file = Path(path).expanduser()
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}={path} cannot be read ({type_and_message(error)}); name a YAML file") from error
    listed = found.get(section) if isinstance(found, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ConfigError(f"{key}={path}: write a list `{section}:` whose entries have `class_name` and `config`")
    for number, entry in enumerate(listed, start=1):
        check_entry(f"{key}={path}: entry {number} of `{section}:`", entry)
    add_folder_of(str(file))
    return listed


def check_entry(place: str, entry: Mapping[str, Any]) -> None:
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"{place} has config={config!r}; write fields below it")
    kind = config.get("type", NATIVE)
    if kind not in (NATIVE, MCP):
        raise ConfigError(f"{place} has config.type={kind!r}; use {NATIVE} or {MCP}")
    if kind == NATIVE and not isinstance(entry.get("class_name"), str):
        raise ConfigError(
            f"{place} has no class_name; it has {', '.join(map(str, entry)) or 'no field'}. Write class_name: "
            "module.Class or file.py:Class"
        )


def made_object(key: str, path: str, name: str, **arguments: Any) -> Any:
    made = load_listed(key, path, "class_name", name)
    try:
        return made(**arguments)
    except Exception as error:
        way = "correct its constructor"
        if arguments.get("tool_schema", "") is None:
            way = "write `tool_schema:` into its entry, or get_openai_tool_schema into its class"
        raise ConfigError(f"{key}={path}: {name} cannot be made ({type_and_message(error)}); {way}") from error


def configured_tool(path: str, entry: Mapping[str, Any]) -> Any:
    """An object of a class of BaseTool."""
    key = f"{MULTI_TURN}.tool_config_path"
    schema = entry.get("tool_schema")
    given = None if schema is None else tool_schema_object(schema)
    config = dict(entry.get("config") or {})
    tool = made_object(key, path, entry["class_name"], config=config, tool_schema=given)
    missing = [name for name in ("create", "execute", "release") if not callable(getattr(tool, name, None))]
    if missing or getattr(tool, "tool_schema", None) is None:
        lacks = missing[0] if missing else "tool_schema"
        raise ConfigError(f"{key}={path}: {entry['class_name']} has no {lacks}; derive it from BaseTool")
    return tool


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """verl's function of this name, with which agent loops load the tools of a YAML file."""
    key = f"{MULTI_TURN}.tool_config_path"
    return [configured_tool(tools_config_file, entry) for entry in read_yaml(key, tools_config_file, "tools")]


def tool_schema_object(schema: Mapping[str, Any]) -> Any:
    """verl's own class if it is installed: its tools may check for it."""
    schemas = importlib.import_module("verl.tools.schemas")
    return schemas.OpenAIFunctionToolSchema.model_validate(schema)


class ConfiguredTools(Toolset):
    """Tools of classes of BaseTool. They are made once, and have an instance for each episode."""

    gives_reward = asks_at_end = True

    def __init__(self, made: Sequence[Any]) -> None:
        self.made = {str(tool.name): tool for tool in made}
        self.instances: dict[str, str] = {}
        self.kwargs: Mapping[str, Any] = {}
        self.data = AgentData([], {})

    def begin(self, calls: UserCalls, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        self.kwargs = tools_kwargs(row)
        if extra_info(row).get("need_tools_kwargs") and not self.kwargs:
            raise ValueError("extra_info.need_tools_kwargs is true, and the row has no extra_info.tools_kwargs")
        self.data = AgentData(list(messages), self.kwargs)
        chosen = selected_tools(row)
        for name, tool in self.made.items():
            if chosen is not None and name not in chosen:
                continue
            given = self.given(name, "create_kwargs")
            created = calls(tool.create, **accepted(tool.create, {"create_kwargs": given, **given}))
            self.instances[name] = created[0] if isinstance(created, tuple) else created
        return tuple(messages)

    def given(self, name: str, what: str) -> dict[str, Any]:
        """A row's arguments of one method. A parquet file has null for those that another row has."""
        found = (self.kwargs.get(name) or {}).get(what) or {}
        return {key: value for key, value in found.items() if value is not None}

    def tools(self) -> Sequence[Tool]:
        return [
            Tool(schema_of(tool.tool_schema), self.execute(name), self.read, result_characters=VERL_RESULT_CHARACTERS)
            for name, tool in self.made.items()
        ]

    def execute(self, name: str) -> Callable[..., Any]:
        async def run(**parameters: Any) -> Any:
            tool = self.made[name]
            further = accepted(tool.execute, {"agent_data": self.data, **self.given(name, "execute_kwargs")})
            found = tool.execute(self.instances[name], parameters, **further)
            return await found if inspect.isawaitable(found) else found

        return run

    def read(self, found: Any) -> ToolResult:
        result = function_result(found)
        if result.reward is not None:
            self.data.tool_rewards.append(result.reward)
        self.data.metrics.update(numbers(result.metrics))
        return result

    def reward(self, calls: UserCalls) -> float | None:
        """The sum of those that are numbers."""
        total = 0.0
        for name, instance in self.instances.items():
            calc_reward = getattr(self.made[name], "calc_reward", None)
            found = (
                None if calc_reward is None else calls(calc_reward, instance, **self.given(name, "calc_reward_kwargs"))
            )
            total += found if isinstance(found, int | float) else 0.0
        return total

    def report(self) -> EnvironmentReport:
        facts = {**plain_values(self.data.extra_fields), "tool_rewards": self.data.tool_rewards}
        return EnvironmentReport(facts, metrics=self.data.metrics)

    def close(self, calls: UserCalls) -> None:
        for name, instance in self.instances.items():
            calls(self.made[name].release, instance, **self.given(name, "release_kwargs"))
        self.instances = {}


def configured_interactions(path: str) -> dict[str, Any]:
    """Objects of classes of BaseInteraction by name."""
    key = f"{MULTI_TURN}.interaction_config_path"
    found: dict[str, Any] = {}
    for entry in read_yaml(key, path, "interaction"):
        class_name = str(entry["class_name"])
        short = class_name.rpartition(":" if ":" in class_name else ".")[2]
        name = str(entry.get("name") or short.removesuffix("Interaction").lower() or short.lower())
        if name in found:
            raise ConfigError(f"{key}={path}: two interactions have the name {name}; rename one of them")
        made = made_object(key, path, class_name, config={**(entry.get("config") or {}), "name": name})
        missing = [one for one in ("start_interaction", "generate_response") if not callable(getattr(made, one, None))]
        if missing:
            raise ConfigError(f"{key}={path}: {class_name} has no {missing[0]}; derive it from BaseInteraction")
        found[name] = made
    return found


class Interaction:
    """A class of BaseInteraction answers in place of a user."""

    def __init__(self, made: Mapping[str, Any]) -> None:
        self.made = made
        self.chosen: Any = None
        self.instance = uuid4().hex
        self.kwargs: dict[str, Any] = {}
        self.scores: list[float] = []

    def begin(self, calls: UserCalls, row: Mapping[str, Any]) -> None:
        self.kwargs = interaction_kwargs(row)
        name = str(self.kwargs.get("name", next(iter(self.made)) if len(self.made) == 1 else ""))
        if name not in self.made:
            raise ValueError(
                f"extra_info.interaction_kwargs.name is {name!r}; the interactions are {', '.join(self.made)}"
            )
        self.chosen = self.made[name]
        started = calls(self.chosen.start_interaction, self.instance, **self.kwargs)
        self.instance = started if isinstance(started, str) else self.instance

    def answer(self, calls: UserCalls, messages: Sequence[Message]) -> Observation:
        found = calls(self.chosen.generate_response, self.instance, [dict(one) for one in messages], **self.kwargs)
        done, text, score = found[:3]
        reward = as_reward(score, "generate_response")
        if reward is not None:
            self.scores.append(reward)
        answer = {"role": "user", "content": plain_text(as_text(text))}
        return Observation((answer,), reward, bool(done))

    def report(self) -> EnvironmentReport:
        return EnvironmentReport({"turn_scores": self.scores})

    def close(self, calls: UserCalls) -> None:
        finalize = getattr(self.chosen, "finalize_interaction", None)
        if finalize is not None:
            calls(finalize, **accepted(finalize, {"instance_id": self.instance}))
