"""The argument `reward` of `rloom.train`: functions, names of models and of rules, alone or as a weighted list."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

from rloom.config.base import EMBEDDED_NAME, GIVEN_IN_PYTHON
from rloom.config.load import expand
from rloom.errors import RewardError
from rloom.rewards.function_reward import SIGNATURES
from rloom.rewards.kinds import PARTS
from rloom.rewards.routing import EXACT, PREFIXES, rule_for

logger = logging.getLogger(__name__)
Function = Callable[..., Any]
OneReward = Function | str | Path
RewardArgument = OneReward | Sequence[OneReward]

FUNCTION, MODEL, SOURCE = "custom_reward_function.path", "reward_model.path", "data.default_data_source"
MIX, WEIGHTS = "reward_model.composite.enable", "reward_model.composite.weights"
ENVIRONMENT_PART = "environment_score"
PART_OF = {FUNCTION: "rule_score", MODEL: "rm_score", SOURCE: "rule_score"}
FORMS = (
    "a function, the folder or hub name (OWNER/NAME) of a reward model, the name of a rule, or a list of them with "
    "reward_weights"
)


@dataclass(frozen=True)
class GivenRewards:
    keys: Mapping[str, Any] = field(default_factory=dict)  # the keys that select them
    functions: Mapping[str, Function] = field(default_factory=dict)  # part of the reward -> its function

    @property
    def data_source(self) -> str | None:
        """For rows without one: the name of a rule."""
        return self.keys.get(SOURCE)


def given_rewards(
    reward: RewardArgument | None, weights: Sequence[float] | None, *, and_environment: bool = False
) -> GivenRewards:
    """`and_environment`: the environment of the calling program gives a reward, too, of weight 1 as in TRL."""
    if reward is None:
        if weights is not None:
            raise RewardError("reward_weights are given without reward; give a list of rewards")
        return GivenRewards()
    several: list[Any] = [*reward] if isinstance(reward, list | tuple) else [reward]
    if not several:
        raise RewardError(f"reward is an empty list; give {FORMS}")
    if and_environment:
        found = mixed(several, checked_weights(weights, len(several)))
        return replace(found, keys={**found.keys, WEIGHTS: {**found.keys[WEIGHTS], ENVIRONMENT_PART: 1.0}})
    if len(several) == 1 and weights is None:
        key, value = key_of(several[0])
        return GivenRewards({key: value}, {PART_OF[FUNCTION]: several[0]} if callable(several[0]) else {})
    return mixed(several, checked_weights(weights, len(several)))


def mixed(rewards: Sequence[OneReward], weights: Sequence[float]) -> GivenRewards:
    """The parts of a composite reward. Those of functions have the functions' names."""
    keys: dict[str, Any] = {}
    functions: dict[str, Function] = {}
    parts: dict[str, float] = {}
    for reward, weight in zip(rewards, weights, strict=True):
        key, value = key_of(reward)
        if key in keys and not callable(reward):
            raise RewardError(
                f"reward has {keys[key]} and {value}: a run takes one {'model' if key == MODEL else 'rule'} as reward; "
                "call the other one in a function"
            )
        keys[key] = value
        name = new_name(reward, parts) if callable(reward) else PART_OF[key]
        if callable(reward):
            functions[name] = reward
        parts[name] = weight
    return GivenRewards({**keys, MIX: True, WEIGHTS: parts}, functions)


def key_of(reward: Any) -> tuple[str, Any]:
    """The key that selects one reward, and its value."""
    is_model = type(reward).__module__.partition(".")[0] in ("transformers", "peft")  # those are callable, too
    if callable(reward) and not is_model:
        return FUNCTION, GIVEN_IN_PYTHON
    if not isinstance(reward, str | Path):
        raise RewardError(f"reward is {type(reward).__name__}; give {FORMS}. A function is one of:{SIGNATURES}")
    text = str(reward)
    rule = rule_name(text)
    if rule is not None:
        return SOURCE, rule
    if text == EMBEDDED_NAME or expand(text).is_dir() or re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return MODEL, text
    if text.endswith(".py") or ".py:" in text:
        raise RewardError(
            f"reward={text!r}: import the function and give it itself; or name the file by the key {FUNCTION}"
        )
    rules = ", ".join([*(name.rpartition("/")[2] for name in EXACT), *PREFIXES])
    raise RewardError(
        f"reward={text!r}: there is no rule, no folder and no hub name (OWNER/NAME) of that name; reward is {FORMS}. "
        f"Rules: {rules}"
    )


def rule_name(text: str) -> str | None:
    """The data source whose rule a text names: `openai/gsm8k`, or its last part."""
    exact = next((name for name in EXACT if text.casefold() in (name.casefold(), name.rpartition("/")[2])), None)
    return exact or (text if rule_for(text) is not None and not expand(text).exists() else None)


def checked_weights(weights: Sequence[float] | None, number: int) -> list[float]:
    found = [1.0] * number if weights is None else list(weights)
    if len(found) != number:
        raise RewardError(f"reward_weights has {len(found)} numbers for {number} rewards; give one for each")
    wrong = next((weight for weight in found if isinstance(weight, bool) or not isinstance(weight, int | float)), None)
    if wrong is not None:
        raise RewardError(f"reward_weights has {wrong!r}; weights are numbers")
    return found


def new_name(function: Function, taken: Mapping[str, Any]) -> str:
    """Name of a function's part: its own, with a number if another part has it."""
    own = re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_") or "function"
    names = (own if number == 1 else f"{own}_{number}" for number in range(1, len(taken) + len(PARTS) + 2))
    return next(name for name in names if name not in taken and name not in PARTS)


class ZeroScores:
    """Finds functions with `completions` whose scores are all 0 in the first step because rows are chats: each
    completion is then a list of messages, as in TRL, and code that expects text finds nothing in it."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._called_with_chats: set[str] = set()
        self.functions = {
            name: self._observed(name, one) if takes_completions(one) else one for name, one in functions.items()
        }

    def check(self, metrics: Mapping[str, float]) -> None:
        """`metrics`: those of the first step."""
        for name in sorted(self._called_with_chats):
            alone = name == PART_OF[FUNCTION]
            shown = ("critic/score/min", "critic/score/max") if alone else (f"reward/{name}",)
            if all(metrics.get(metric) == 0 for metric in shown):
                function = getattr(self.functions[name], "__name__", name)
                logger.warning(
                    f"Note: every score of {function} is 0 in this step. The prompts are lists of messages, so each "
                    "completion is one too, as in TRL: its text is completion[0]['content']"
                )

    def _observed(self, name: str, function: Function) -> Function:
        @wraps(function)
        def observed(*args: Any, **kwargs: Any) -> Any:
            completions = kwargs.get("completions") or [""]
            if isinstance(completions[0], list):
                self._called_with_chats.add(name)
            return function(*args, **kwargs)

        return observed


def takes_completions(function: Function) -> bool:
    try:
        return "completions" in signature(function).parameters
    except ValueError:  # built-in functions may have none
        return False
