"""The reward of a `train.sh` run: the keys of its files, and a sentence about what is used."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rloom.config.frontends.kit_files import FUNCTION, JUDGE, KeyFile, function_file, judge_file, reward_file

MIX, WEIGHTS = "reward_model.composite.enable", "reward_model.composite.weights"
FUNCTION_KEY = "custom_reward_function.path"
# keys that set a reward other than rules and functions
OTHER_REWARDS = ("reward_model.path", "reward_model.model.path", f"{JUDGE}.enable", "reward_model.remote.urls")


def reward_values(
    flags: Mapping[str, Any], typed: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """(values of the files, sentence). `flags`: of flags and variables. `typed`: key=value of the command line."""
    files = used_files(flags, typed, environment)
    values = {key: value for file in files for key, value in file.values.items()}
    given = {**values, **flags, **typed}
    function = None if FUNCTION_KEY in given else function_file(environment)
    is_used = function is not None and uses_rule_score(given, has_mix(values, typed))
    if is_used:
        values[FUNCTION_KEY] = str(function)
    sentence = f"Reward: {described({**values, **flags, **typed}, has_mix(values, typed))}"
    if files:
        sentence += f", with the keys of {' and '.join(str(file.path) for file in files)}"
    if function is not None and not is_used:
        sentence += f"; {FUNCTION} of {function} is not used, because another reward is set and no mix uses rule_score"
    return values, sentence


def used_files(flags: Mapping[str, Any], typed: Mapping[str, str], environment: Mapping[str, str]) -> Sequence[KeyFile]:
    """A mix that is not enabled is left out, because keys without effect are reported to the user."""
    reward = reward_file(environment)
    if reward is not None and not has_mix(reward.values, typed):
        others = {key: value for key, value in reward.values.items() if key not in (MIX, WEIGHTS)}
        reward = replace(reward, values=others)
    judge = judge_file(environment) if flags.get(f"{JUDGE}.enable") else None
    return [file for file in (reward, judge) if file is not None and file.values]


def has_mix(values: Mapping[str, Any], typed: Mapping[str, str]) -> bool:
    return typed[MIX].lower() == "true" if MIX in typed else bool(values.get(MIX))


def uses_rule_score(given: Mapping[str, Any], mix: bool) -> bool:
    """Without a mix, rules and functions are used if no other reward is set."""
    if mix:
        weights = given.get(WEIGHTS) or {}
        return f"{WEIGHTS}.rule_score" in given or "rule_score" in weights
    return not any(given.get(key) for key in OTHER_REWARDS)


def described(given: Mapping[str, Any], mix: bool) -> str:
    found = []
    if given.get("reward_model.path"):
        found.append(f"reward model {given['reward_model.path']}")
    if given.get(f"{JUDGE}.enable"):
        found.append("API judge")
    if given.get("reward_model.remote.urls"):
        found.append("reward servers")
    if given.get(FUNCTION_KEY):
        found.append(f"{FUNCTION} of {given[FUNCTION_KEY]}")
    elif uses_rule_score(given, mix):
        found.append("rules, selected by the data_source of each row")
    return ("a mix of " if mix else "") + " and ".join(found)
