"""Environments that read the policy's text and answer in text."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rloom.episodes.base import EnvironmentReport, EpisodeLimits, Observation, ToolSchema
from rloom.episodes.contracts.calls import (
    OPTIONS,
    UserCalls,
    as_reward,
    as_text,
    numbers,
    plain_values,
    reset_arguments,
)
from rloom.episodes.contracts.tools import begun, close
from rloom.errors import ConfigError
from rloom.types import Message, plain_text

GYMNASIUM = ("gymnasium", "gym")  # packages that define spaces
COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)  # such as the place of the player
WHOLE_NUMBER = re.compile(r"-?\d+")


class NotAnAction(Exception):
    """An answer that the environment's space of actions does not have."""


class TextEnvironment:
    """Gymnasium's form: `reset(**row)`, and `step(text)` -> (observation, reward, done)."""

    tools: tuple[ToolSchema, ...] = ()

    def __init__(self, instance: Any, limits: EpisodeLimits, seed: int = 0) -> None:
        self.instance, self.limits, self.seed, self.calls = instance, limits, seed, UserCalls(limits.call_s)
        self.action = action_of(instance)

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        reset = self.instance.reset
        found = self.calls(reset, **reset_arguments(reset, row, self.seed))
        return begun(messages, self.shown(found[0] if isinstance(found, tuple) else found))  # (observation, info)

    def act(self, text: str, marked: str | None = None) -> Observation:
        try:
            action = self.action(text)
        except NotAnAction as error:
            return Observation(as_messages(f"Error: {error}"))
        return self.observation(self.calls(self.instance.step, action))

    def observation(self, found: Any) -> Observation:
        if isinstance(found, Mapping):
            seen, reward, done = found.get("observations", found.get("observation")), found.get("reward"), found["done"]
        elif isinstance(found, tuple) and len(found) in (3, 4):  # (observation, reward, done) or Gym's, with info
            seen, reward, done = found[:3]
        elif isinstance(found, tuple) and len(found) == 5:  # Gymnasium: the fourth says that the episode was cut short
            seen, reward, done = found[0], found[1], found[2] or found[3]
        else:
            raise TypeError(
                f"step returned {type(found).__name__}; return (observation, reward, done) or a dict with them"
            )
        return Observation(as_messages(self.shown(seen)), as_reward(reward, "step"), bool(done))

    def shown(self, seen: Any) -> Any:
        """As text: the environment renders itself as text, or is of Gymnasium, where observations may be numbers."""
        if getattr(self.instance, "render_mode", None) == "ansi":
            return COLOURED.sub(r"[\1]", as_text(self.calls(self.instance.render)))
        is_value = isinstance(seen, int | float | tuple) or callable(getattr(seen, "tolist", None))
        return as_text(seen) if is_value and takes_options(self.instance) else seen

    reward_of_steps: float | None = 0.0  # beyond the rewards of the steps, of which there may be none

    def end(self) -> float | None:
        return self.reward_of_steps

    def report(self) -> EnvironmentReport:
        get_metrics = getattr(self.instance, "get_metrics", None)
        metrics = {} if get_metrics is None else numbers(self.calls(get_metrics))
        return EnvironmentReport(state=plain_values(getattr(self.instance, "__dict__", {})), metrics=metrics)

    def close(self) -> None:
        try:
            close(self.calls, self.instance)
        finally:
            self.calls.close()


class ConversationEnvironment(TextEnvironment):
    """SkyRL's form: `init(prompt)` -> (messages, metadata), and `step(text)` -> {"observations", "reward", "done"}.

    A `postprocessed_action` is not used: what is trained is what was sampled.
    """

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        found = self.calls(self.instance.init, [dict(message) for message in messages])
        return begun(messages, found[0] if isinstance(found, tuple) else found)


def takes_options(instance: Any) -> bool:
    """Whether its `reset` has Gymnasium's signature."""
    reset = getattr(instance, "reset", None)
    return reset is not None and OPTIONS in inspect.signature(reset).parameters


def action_of(instance: Any) -> Callable[[str], Any]:
    """Makes an action of an answer, for the environment's space of actions: the text, or the number in it."""
    space: Any = getattr(instance, "action_space", None)
    kinds = [one for one in type(space).__mro__ if one.__module__.partition(".")[0] in GYMNASIUM]
    names = [one.__name__ for one in kinds]
    if not names or "Text" in names:
        return str
    if "Discrete" in names:
        first = int(space.start)
        return lambda text: numbered_action(text, first, first + int(space.n) - 1)
    raise ConfigError(
        f"the environment {type(instance).__name__} has actions of the space {names[0]}, and an answer is text; use "
        "Text or Discrete, or convert the text in a gymnasium.ActionWrapper"
    )


def numbered_action(text: str, first: int, last: int) -> int:
    """The last whole number of the answer."""
    found = WHOLE_NUMBER.findall(text)
    if not found or len(found[-1]) > 18 or not first <= (number := int(found[-1])) <= last:
        raise NotAnAction(f"end the answer with a whole number from {first} to {last}")
    return number


def as_messages(seen: Any) -> tuple[Message, ...]:
    """A text is a message of the user; None or an empty one adds nothing."""
    if isinstance(seen, str):
        seen = [{"role": "user", "content": seen}]
    if not isinstance(seen or [], Sequence) or any(
        not isinstance(one, Mapping) or not {"role", "content"} <= one.keys() for one in seen or []
    ):
        raise TypeError(
            f"step returned an observation of {type(seen).__name__}; it is a text, or messages with a role and content"
        )
    kept = [{**one, "content": plain_text(as_text(one["content"]))} for one in seen or []]
    return tuple(one for one in kept if one["content"])
