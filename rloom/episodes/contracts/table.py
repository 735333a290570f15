"""Users' classes, functions and files as environments: what fits which contract, and what serves it.

| what the user gives | known from | served by |
| --- | --- | --- |
| functions; a class with tools as public methods, `reset(**row)`, `get_reward()`; classes by name | TRL | tools |
| a file with `@function_tool`, a YAML file of BaseTool classes, one of BaseInteraction classes | verl | tools, verl |
| MCP servers, in a YAML or a JSON file | MCP | mcp_servers |
| a class with `reset(**row)` and `step(text)` -> (observation, reward, done) | Gymnasium | TextEnvironment |
| a class with `init(prompt)` and `step(text)` -> {"observations", "reward", "done"} | SkyRL | ConversationEnvironment |
"""

import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.agents.process import PATH_KEY
from rloom.episodes.base import Environment, EnvironmentSetup, EpisodeLimits, ToolSchema
from rloom.episodes.contracts.calls import UserCalls, required_columns
from rloom.episodes.contracts.mcp_servers import McpServer, McpTools, servers_of_entry, servers_of_file
from rloom.episodes.contracts.text import ConversationEnvironment, TextEnvironment
from rloom.episodes.contracts.tools import (
    NOT_TOOLS,
    SCORES,
    FunctionTools,
    MethodTools,
    Tool,
    ToolEnvironment,
    Toolset,
    public_methods,
)
from rloom.episodes.contracts.verl import (
    MCP,
    ConfiguredTools,
    Interaction,
    configured_interactions,
    configured_tool,
    function_tools,
    read_yaml,
)
from rloom.episodes.kinds import ENVIRONMENT_KEY
from rloom.episodes.rows import CodeNames, chosen_environment
from rloom.episodes.schema import tool_schema
from rloom.errors import ConfigError
from rloom.plugins import load_plugin

NEAR_NAME = 0.85  # smallest difflib ratio of a misspelt method, such as get_rewards


@dataclass(frozen=True)
class Contract:
    """A form of text environments. The first that an object fits serves it."""

    fits: Callable[[Any], bool]
    serve: Callable[[Any, EpisodeLimits, int], Environment]  # with the seed of the episode


def has(instance: Any, *methods: str) -> bool:
    return all(callable(getattr(instance, name, None)) for name in methods)


TEXT_CONTRACTS = (
    Contract(lambda instance: has(instance, "init", "step"), ConversationEnvironment),
    Contract(lambda instance: has(instance, "reset", "step"), TextEnvironment),
)


@dataclass(frozen=True)
class UserCode:
    """What the environments of a run are made of, loaded once."""

    limits: EpisodeLimits
    given: Any = None  # a class, a function that returns an instance, a list of functions, or several of them by name
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    functions: Sequence[Tool] = ()
    configured: Sequence[Any] = ()  # objects of classes of BaseTool
    servers: Sequence[McpServer] = ()
    interactions: Mapping[str, Any] = field(default_factory=dict)
    call_format: str = "auto"

    def environment(self, row: Mapping[str, Any], seed: int) -> Environment:
        """A new one for an episode. `row`: the columns of the data."""
        given = self.chosen(row)
        if given is None or is_functions(given):
            return self.with_functions(given)
        return self.served(self.made(given, row), seed)

    def with_functions(self, given: Sequence[Callable[..., Any]] | None) -> Environment:
        return self.with_tools([FunctionTools.of(given or ())])

    def served(self, instance: Any, seed: int) -> Environment:
        check_no_states(instance)
        for contract in TEXT_CONTRACTS:
            if contract.fits(instance):
                self.check_no_tools(instance)
                return contract.serve(instance, self.limits, seed)
        check_tools(instance)
        return self.with_tools([MethodTools(instance, seed)])

    def with_tools(self, first: Sequence[Toolset]) -> Environment:
        toolsets = [
            *first,
            *([FunctionTools(self.functions)] if self.functions else []),
            *([ConfiguredTools(self.configured)] if self.configured else []),
            *map(McpTools, self.servers),
        ]
        user = Interaction(self.interactions) if self.interactions else None
        return ToolEnvironment(toolsets, self.limits, self.call_format, user)

    def chosen(self, row: Mapping[str, Any]) -> Any:
        if not isinstance(self.given, Mapping):
            return self.given
        column, name = chosen_environment(row) or ("environment", None)
        if name not in self.given:
            raise ValueError(f"the row has {column}={name!r}; the environments are {', '.join(self.given)}")
        return self.given[name]

    def made(self, given: Any, row: Mapping[str, Any]) -> Any:
        """SkyRL's classes receive the row when they are made, others when they begin."""
        calls = UserCalls(self.limits.call_s)
        if not takes_row(given):
            return calls(given, **self.kwargs)
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        if self.limits.turns is not None:
            extras["max_turns"] = self.limits.turns
        settings = EnvironmentSettings({**default_settings(given), **self.kwargs})
        return calls(given, env_config=settings, extras=extras)

    def check_no_tools(self, instance: Any) -> None:
        if self.functions or self.configured or self.servers or self.interactions:
            raise ConfigError(
                f"{type(instance).__name__} has a `step` that reads text, so it has no tools; remove "
                "function_tool_path, tool_config_path and interaction_config_path, or give `step` another name"
            )

    def described(self) -> tuple[tuple[ToolSchema, ...], CodeNames]:
        """All tools, and what rows may name. Finds what does not fit before the run starts."""
        every = self.given if isinstance(self.given, Mapping) else {"": self.given}
        found: dict[str, ToolSchema] = {}
        needed: dict[str, list[str]] = {}
        unscored: list[str] = []
        for name, given in every.items():
            needed[name] = []
            if given is not None and not is_functions(given) and takes_row(given):
                check_methods(given, "init", "step")
                continue
            if not (given is None or callable(given) or is_functions(given)):
                raise ConfigError(
                    f"the environment is a {type(given).__name__}; give a class, a function that returns an instance, "
                    "a list of functions, or a dict of them by name"
                )
            functions = given is None or is_functions(given)
            instance = None if functions else self.made(given, {})
            environment = self.with_functions(given) if functions else self.served(instance, seed=0)
            found.update({str(tool["function"]["name"]): tool for tool in environment.tools})
            if isinstance(environment, ToolEnvironment) and not environment.gives_reward:
                unscored.append(name)
            reset = getattr(instance, "reset", None)
            if reset is not None and not has(instance, "init"):
                needed[name] = required_columns(reset)
            if isinstance(environment, ToolEnvironment):
                environment.calls.close()
        configured = [str(tool.name) for tool in self.configured]
        return tuple(found.values()), CodeNames(needed, list(found), configured, list(self.interactions), unscored)


def is_functions(given: Any) -> bool:
    return isinstance(given, Sequence) and all(map(callable, given))


def takes_row(given: Any) -> bool:
    try:
        return "extras" in inspect.signature(given).parameters
    except (TypeError, ValueError):  # not a class or a function of Python
        return False


def default_settings(given: Any) -> dict[str, Any]:
    """The values of the dataclass that SkyRL's classes write as the type of `env_config`."""
    try:
        hints = get_type_hints(given.__init__ if inspect.isclass(given) else given)
    except Exception:  # of names that cannot be resolved
        return {}
    kinds = [hints.get("env_config"), *get_args(hints.get("env_config"))]
    found = next((kind for kind in kinds if is_dataclass(kind)), None)
    if found is None:
        return {}
    return {one.name: one.default for one in fields(found) if one.default is not MISSING}


def check_methods(given: Any, *methods: str) -> None:
    for name in methods:
        if inspect.isclass(given) and not callable(getattr(given, name, None)):
            raise ConfigError(f"the environment {given.__name__} takes `extras`, as SkyRL's do, and has no `{name}`")


def check_no_states(instance: Any) -> None:
    if has(instance, "reset", "step") and "states" in inspect.signature(instance.step).parameters:
        raise ConfigError(
            f"{type(instance).__name__} is an agent of OpenRLHF, whose feedback is added without a chat template; name "
            f"it in {PATH_KEY}"
        )


def check_tools(instance: Any) -> None:
    name = type(instance).__name__
    if has(instance, "step"):
        raise ConfigError(
            f"the environment {name} has `step`, and neither `reset(**row)` nor `init(prompt)`; write one"
        )
    if has(instance, "execute", "release"):
        raise ConfigError(f"{name} is a tool of verl; list it in a YAML file and set {MULTI_TURN}.tool_config_path")
    if has(instance, "generate_response"):
        raise ConfigError(
            f"{name} is an interaction of verl; list it in a YAML file and set {MULTI_TURN}.interaction_config_path"
        )
    for method, function in public_methods(instance).items():
        meant = misspelt(method, described=bool(inspect.getdoc(function)))
        if meant is not None and not has(instance, meant):
            raise ConfigError(
                f"the environment {name} has a method `{method}`, which would be a tool that the policy calls, and no "
                f"`{meant}`; rename the method"
            )
    if not public_methods(instance):
        raise ConfigError(
            f"the environment {name} has no `step` and no public method that could be a tool; write one of them"
        )


def misspelt(method: str, *, described: bool) -> str | None:
    """The method that was meant, if any. `described`: it has a docstring, so that `rest` may be a tool of a game."""
    written = {name.replace("_", ""): name for name in NOT_TOOLS}
    plain = method.replace("_", "").lower()
    [near] = get_close_matches(plain, written, n=1, cutoff=NEAR_NAME) or [""]
    is_meant = near and (near == plain or not described or written[near] == SCORES)
    return written[near] if is_meant else None


class EnvironmentSettings(dict[str, Any]):
    """SkyRL's environments read their settings as attributes and as items."""

    def __getattr__(self, name: str) -> Any:
        try:
            found = self[name]
        except KeyError:
            raise AttributeError(f"multi_turn.environment_kwargs has no {name!r}") from None
        return EnvironmentSettings(found) if isinstance(found, dict) else found


def load_code(setup: EnvironmentSetup) -> UserCode:
    """Import the user's files. ConfigError: one of them cannot be used."""
    given: Any = None if setup.reference is None else load_plugin(ENVIRONMENT_KEY, setup.reference)
    functions = [] if setup.function_tool_path is None else function_tools(setup.function_tool_path)
    if setup.objects is not None:
        path, pickled = pickle.loads(setup.objects)
        sys.path.extend(folder for folder in path if folder not in sys.path)  # where the program's modules are
        objects = pickle.loads(pickled)
        given = objects.get("environment", given)
        functions += [Tool(tool_schema(function), function) for function in objects.get("tools", ())]
    configured, servers = ([], []) if setup.tool_config_path is None else configured_tools(setup.tool_config_path)
    interactions = (
        {} if setup.interaction_config_path is None else configured_interactions(setup.interaction_config_path)
    )
    return UserCode(setup.limits, given, setup.kwargs, functions, configured, servers, interactions, setup.call_format)


def configured_tools(path: str) -> tuple[list[Any], list[McpServer]]:
    """Of verl's YAML file, or of a JSON file of MCP servers."""
    key = f"{MULTI_TURN}.tool_config_path"
    if path.endswith(".json"):
        return [], servers_of_file(f"{key}={path}", path)
    made, servers = [], []
    for entry in read_yaml(key, path, "tools"):
        if (entry.get("config") or {}).get("type") == MCP:
            servers += servers_of_entry(key, path, entry)
        else:
            made.append(configured_tool(path, entry))
    return made, servers
