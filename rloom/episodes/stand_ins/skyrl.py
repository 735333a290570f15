"""Names of skyrl_gym that users' environments import, where it is not installed."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypedDict, TypeVar

MessageType = dict[str, str]
ConversationType = list[MessageType]
ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")


class EnvStepOutput(TypedDict):
    observations: Any
    reward: Any
    done: bool
    metadata: dict[str, Any] | None


class BaseTextEnvStepOutput(TypedDict, total=False):
    observations: ConversationType
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: str | None


class Env(Generic[ObsType, ActType]):
    def init(self, prompt: ObsType) -> tuple[ObsType, dict[str, Any]]:
        raise NotImplementedError

    def step(self, action: ActType) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        return


class BaseTextEnv(Env[ConversationType, str]):
    """Reads the policy's text and answers with messages. Made with `env_config` and `extras`, the row."""

    def __init__(self) -> None:
        self.turns = 0
        self.max_turns = 1
        self.init_tool_groups()

    def init_tool_groups(self, tool_groups: Sequence["ToolGroup"] = ()) -> None:
        self.tool_groups = list(tool_groups)
        self.tool_to_toolgroup = {
            name: group for one in tool_groups for name, group in one.get_tool_to_group_mapping().items()
        }

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        group = next((one for one in self.tool_groups if one.name == tool_group_name), None)
        if group is None:
            raise ValueError(f"there is no group of tools {tool_group_name!r}")
        return group.execute_tool(tool_name, *tool_input)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        raise NotImplementedError

    def get_metrics(self) -> dict[str, Any]:
        return {}


class tool:  # a decorator
    """A method of a ToolGroup that is one of its tools."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.name = func, func.__name__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)


class ToolGroup:
    """Tools that an environment calls itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_name(self) -> str:
        return self.name

    def get_tool_names(self) -> list[str]:
        return [name for name in dir(type(self)) if isinstance(getattr(type(self), name), tool)]

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return getattr(self, name) if name in self.get_tool_names() else None

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = self.get_tool(name)
        if found is None:
            raise ValueError(f"the group {self.name!r} has no tool {name!r}")
        return found(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self.get_tool_names(), self.name)


REGISTERED: dict[str, Any] = {}


def register(id: str, entry_point: Any, **kwargs: Any) -> None:
    """Files that register their environment are imported; `multi_turn.environment` names the class itself."""
    REGISTERED[id] = entry_point
