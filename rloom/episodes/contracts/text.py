"""Environments that read the policy's text and answer in text."""

from collections.abc import Mapping, Sequence
from typing import Any

from rloom.episodes.base import EnvironmentReport, EpisodeLimits, Observation, ToolSchema
from rloom.episodes.contracts.calls import UserCalls, as_reward, as_text, numbers, plain_values
from rloom.episodes.contracts.tools import begun, close, shortened
from rloom.types import Message


class TextEnvironment:
    """Gymnasium's form: `reset(**row)`, and `step(text)` -> (observation, reward, done)."""

    tools: tuple[ToolSchema, ...] = ()

    def __init__(self, instance: Any, limits: EpisodeLimits) -> None:
        self.instance, self.limits, self.calls = instance, limits, UserCalls(limits.call_s)

    def begin(self, row: Mapping[str, Any], messages: Sequence[Message]) -> tuple[Message, ...]:
        found = self.calls(self.instance.reset, **row)
        return begun(messages, found[0] if isinstance(found, tuple) else found)  # Gymnasium: (observation, info)

    def act(self, text: str, marked: str | None = None) -> Observation:
        return self.observation(self.calls(self.instance.step, text))

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
        return Observation(as_messages(seen, self.limits), as_reward(reward), bool(done))

    def end(self) -> float | None:
        return 0.0  # beyond the rewards of the steps, of which there may be none

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


def as_messages(seen: Any, limits: EpisodeLimits) -> tuple[Message, ...]:
    """A text is a message of the user; None or an empty one adds nothing."""
    if isinstance(seen, str):
        seen = [{"role": "user", "content": seen}]
    if not isinstance(seen or [], Sequence) or any(
        not isinstance(one, Mapping) or not {"role", "content"} <= one.keys() for one in seen or []
    ):
        raise TypeError(
            f"step returned an observation of {type(seen).__name__}; it is a text, or messages with a role and content"
        )
    kept = [{**one, "content": shortened(as_text(one["content"]), limits)} for one in seen or []]
    return tuple(one for one in kept if one["content"])
