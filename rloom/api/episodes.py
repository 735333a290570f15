"""The arguments `environment` and `tools` of `rloom.train`: objects of the calling program, for processes of their own.

They are pickled by value where they are defined in a notebook or in the program itself, and by reference where they
come from a module.
"""

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rloom.config.base import GIVEN_IN_PYTHON
from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.kinds import ENVIRONMENT_KEY
from rloom.errors import ConfigError

EnvironmentArgument = str | Callable[..., Any] | Mapping[str, Callable[..., Any]]
TOOLS_KEY, CALLS_KEY = f"{MULTI_TURN}.function_tool_path", f"{MULTI_TURN}.max_parallel_calls"
MOST_CALLS = 16  # in one turn; TRL runs all
EPISODE_ARGUMENTS = {ENVIRONMENT_KEY: "environment", TOOLS_KEY: "tools"}


def episode_keys(environment: Any, tools: Any, reward: Any) -> dict[str, Any]:
    """The keys that select them."""
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence) or not all(map(callable, tools)):
        raise ConfigError(f"tools is {type(tools).__name__}; give a list of functions")
    found: dict[str, Any] = {TOOLS_KEY: GIVEN_IN_PYTHON} if tools else {}
    if environment is None or isinstance(environment, str):
        return found if environment is None else {**found, ENVIRONMENT_KEY: environment}
    every = list(environment.values()) if isinstance(environment, Mapping) else [environment]
    if not every or not all(map(callable, every)):
        raise ConfigError(
            f"environment is {type(environment).__name__}; give a class, a function that returns an instance, a dict "
            "of them by name, or the name of an environment"
        )
    if reward is None and all(isinstance(one, type) for one in every) and not gives_reward(environment):
        raise ConfigError("the environment has no get_reward, so nothing scores the episodes; write it, or give reward")
    return {**found, ENVIRONMENT_KEY: GIVEN_IN_PYTHON}


def gives_reward(environment: Any) -> bool:
    every = environment.values() if isinstance(environment, Mapping) else [environment]
    return any(callable(getattr(one, name, None)) for one in every for name in ("get_reward", "step"))


def pickled_objects(environment: Any, tools: Sequence[Callable[..., Any]]) -> bytes | None:
    """For `EnvironmentSetup.objects`. None: neither is an object."""
    objects: dict[str, Any] = {"tools": list(tools)} if tools else {}
    if environment is not None and not isinstance(environment, str):
        objects["environment"] = environment
    if not objects:
        return None
    import cloudpickle  # a run from files needs none

    try:
        return pickle.dumps((list(sys.path), cloudpickle.dumps(objects)))
    except Exception as error:
        raise ConfigError(
            f"the environment or the tools cannot be sent to their processes ({type(error).__name__}: {error}); put "
            "them into a file, and what they open into `reset`"
        ) from error
