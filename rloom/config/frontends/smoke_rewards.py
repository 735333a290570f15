"""The reward of a smoke run: a tiny classifier for a reward model, rules where a server would be needed."""

from collections.abc import Mapping
from typing import Any

from rloom.config.reward_parts import PARTS, configured
from rloom.config.schema import EMBEDDED, Config
from rloom.config.sources import leaf_keys
from rloom.rewards.judge.addresses import ADDRESS_VARIABLES, address_in

JUDGE, REMOTE, WEIGHTS = "reward_model.api", "reward_model.remote", "reward_model.composite.weights"


def reward_changes(config: Config, environment: Mapping[str, str]) -> dict[str, Any]:
    """Functions of the user stay. A judge stays where an address for it is given, since that may be a local server."""
    reward = config.reward_model
    changes: dict[str, Any] = {}
    for key, path in (("reward_model.path", reward.path), ("reward_model.model.path", reward.model.path)):
        if path is not None:
            changes[key] = EMBEDDED
    if reward.model_path is not None:
        changes |= {"reward_model.label_weights": None, "reward_model.max_length": None}
        changes |= {"reward_model.model.input_tokenizer": None}
    absent = absent_servers(config, environment)
    if reward.api.enable and reward.api.cache_dir is not None:
        changes[f"{JUDGE}.cache_dir"] = f"{config.trainer.default_local_dir}/smoke/judge_cache"
    for source, section in (("judge", JUDGE), ("remote", REMOTE)):
        if source in absent:
            changes |= given_keys(config, section)
    if absent and reward.composite.enable:
        changes[WEIGHTS] = remaining_weights(config, absent)
    return changes


def absent_servers(config: Config, environment: Mapping[str, str]) -> set[str]:
    """Of the sources in reward_parts.py, those that would call a server."""
    judge = config.reward_model.api
    has_address = judge.base_url or address_in(environment, judge.type)
    absent = {"judge"} if judge.enable and not has_address else set()
    return absent | ({"remote"} if config.reward_model.remote.addresses else set())


def server_notes(config: Config) -> dict[str, str]:
    """Key of a server that is not called -> what replaces it."""
    variables = " or ".join(ADDRESS_VARIABLES[config.reward_model.api.type])
    instead = "other parts or rules score the answers"
    return {
        f"{JUDGE}.enable": f" ({instead}; a judge of your own is called at {variables})",
        f"{REMOTE}.urls": f" ({instead})",
    }


def is_key_of_replaced_server(path: str, changes: Mapping[str, Any]) -> bool:
    """A further key of a section whose switch is off: not worth a line."""
    switches = {JUDGE: f"{JUDGE}.enable", REMOTE: f"{REMOTE}.urls"}
    return any(
        path.startswith(f"{name}.") and switch in changes and path != switch for name, switch in switches.items()
    )


def given_keys(config: Config, section: str) -> dict[str, Any]:
    """The keys of the section that are set -> their defaults. Presets and files may set some, too."""
    keys = leaf_keys()
    return {path: keys[path].default for path in sorted(config.given) if path.startswith(f"{section}.")}


def remaining_weights(config: Config, absent: set[str]) -> dict[str, Any]:
    """The parts of the mix that can be computed; the rules if none is left."""
    found = configured(config)
    sources = {
        name: next(source for source in PARTS[name] if found[source]) for name in config.reward_model.composite.weights
    }
    kept = config.model_dump(include={"reward_model"})["reward_model"]["composite"]["weights"]
    return {name: kept[name] for name, source in sources.items() if source not in absent} or {"rule_score": 1.0}
