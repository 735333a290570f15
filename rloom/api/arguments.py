"""Keyword arguments of `rloom.train` and `rloom.open_run`: keys, and rows and functions in place of files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloom.api.config import Source, changed, check_names, composed, is_keys, key_values, settings_of_trl, with_keys
from rloom.api.episodes import (
    CALLS_KEY,
    EPISODE_ARGUMENTS,
    MOST_CALLS,
    EnvironmentArgument,
    episode_keys,
    gives_reward,
    pickled_objects,
)
from rloom.api.rewards import FUNCTION, GivenRewards, RewardArgument, ZeroScores, given_rewards
from rloom.config.base import EMBEDDED_NAME, GIVEN_IN_PYTHON
from rloom.config.derived import reward_parts
from rloom.config.frontends import trl
from rloom.config.frontends.short_names import MODEL, SHORT_NAMES, short_values
from rloom.config.schema import Config
from rloom.data.in_memory import rows_of, with_defaults
from rloom.data.prompts import GivenRows
from rloom.errors import ConfigError
from rloom.launch.early_checks import check_keys, check_run
from rloom.launch.inputs import RunData, UserObjects
from rloom.rewards.function_reward import style_of

DATA_SOURCE = "custom"  # for rows without one, if no rule scores them
ROWS = {"train": "data.train_files", "validation": "data.val_files"}  # argument -> the key of the files it replaces
OWN_NAMES = ("reward", "reward_weights", "train", "validation", "environment", "tools", "callbacks", "args")
Rows = str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]] | Any  # Any: datasets.Dataset, pandas.DataFrame


@dataclass(frozen=True)
class Given:
    """The objects among the arguments."""

    train: Rows | None = None
    validation: Rows | None = None
    reward: RewardArgument | None = None
    reward_weights: Sequence[float] | None = None
    args: Any = None  # a configuration of TRL, or a mapping of its fields
    environment: EnvironmentArgument | None = None
    tools: Sequence[Callable[..., Any]] = ()


def configured(
    source: Source, given: Given, short: Mapping[str, Any], function: str
) -> tuple[Config, RunData, ZeroScores]:
    """The checked configuration, its rows and functions. `function`: for the error about a wrong name."""
    check_names(short, function, *OWN_NAMES)
    source, given = with_trl(source, given, short)
    own = isinstance(given.environment, Mapping) or callable(given.environment)
    rewards = given_rewards(given.reward, given.reward_weights, and_environment=own and gives_reward(given.environment))
    config = with_arguments(source, given, rewards, short)
    if not config.is_given("trainer.resume_mode") and not config.is_given("trainer.resume_from_path"):
        # a cell of a notebook that runs again has often changed: it starts from the beginning
        config = changed(config, {"trainer.resume_mode": "disable"})
    if config.trainer.val_only or config.trainer.node_rank > 0:
        key = "val_only=True" if config.trainer.val_only else f"node_rank={config.trainer.node_rank}"
        raise ConfigError(f"trainer.{key}: use the command `rloom train` for this, or remove the key")
    check_keys(config)
    batch = config.reward_model.reward_manager == "batch"
    for one in rewards.functions.values():
        style_of(one, config.custom_reward_function.reward_kwargs, whole_groups=batch)
    by_rules = any(part.kind.by_data_source for part in reward_parts(config))
    data_source = rewards.data_source or (None if by_rules else DATA_SOURCE)
    zeros = ZeroScores(rewards.functions)
    objects = UserObjects(
        train=given_rows(config, given.train, "train", data_source),
        validation=given_rows(config, given.validation, "validation", data_source),
        functions=zeros.functions,
        episodes=pickled_objects(given.environment, given.tools),
    )
    return *check_run(config, objects), zeros


def with_trl(source: Source, given: Given, short: Mapping[str, Any]) -> tuple[Source, Given]:
    """The keys of a configuration of TRL below those of `source` and the short names."""
    if given.args is None:
        return source, given
    if source is not None and not is_keys(source):
        raise ConfigError("args, a configuration of TRL, goes with keys in a mapping; remove one of the two")
    if type(given.args).__name__.startswith("SFT"):
        raise ConfigError("args is a SFTConfig: `rloom sft` trains on given answers; rloom.from_trl(args) has its keys")
    own = key_values(source or {})
    algorithm = short.get("algorithm") or own.get("algorithm.adv_estimator")
    found = settings_of_trl(given.args, algorithm, device_count(own, short))
    weights = found.reward_weights if given.reward_weights is None else given.reward_weights
    named = {SHORT_NAMES[name].key for name, value in short.items() if value is not None}
    values = {key: value for key, value in found.values.items() if key not in named}
    return {**values, **own}, replace(given, reward_weights=weights)


def device_count(own: Mapping[str, Any], short: Mapping[str, Any]) -> int | None:
    """As the keys say it, of all machines; None: the visible GPUs."""
    model = short.get("model") or own.get(MODEL) or EMBEDDED_NAME
    on_one = own.get("trainer.device") == "cpu" or model == EMBEDDED_NAME
    count = short.get("n_gpus") or own.get("trainer.n_gpus_per_node") or (1 if on_one else None)
    machines = own.get("trainer.nnodes") or 1
    if count is None and machines == 1:
        return None
    return int(count or trl.visible()) * int(machines)


def with_arguments(source: Source, given: Given, rewards: GivenRewards, short: Mapping[str, Any]) -> Config:
    base = composed(source)
    rows = {ROWS["train"]: given.train, ROWS["validation"]: given.validation}
    files = {key: file_names(value) or GIVEN_IN_PYTHON for key, value in rows.items() if value is not None}
    episodes = episode_keys(given.environment, given.tools, given.reward)
    objects = {**files, **rewards.keys, **episodes}
    arguments = {**{key: name for name, key in ROWS.items()}, FUNCTION: "reward", **EPISODE_ARGUMENTS}
    for key in objects:
        if base.is_given(key):
            raise ConfigError(f"{key} and the argument {arguments.get(key, 'reward')} are both given; keep one")
    values, further = short_values(short)
    if episodes:
        further = {CALLS_KEY: MOST_CALLS, **further}
    own = {key: value for key, value in further.items() if not base.is_given(key)}
    every = {**own, **values, **objects}
    return with_keys(source, (), every) if every else base


def file_names(given: Rows) -> str | list[str] | None:
    """Data files, if the argument names some. None: it is rows."""
    if isinstance(given, str | Path):
        return str(given)
    is_list = isinstance(given, list | tuple) and bool(given) and all(isinstance(one, str | Path) for one in given)
    return [str(one) for one in given] if is_list else None


def given_rows(config: Config, given: Rows | None, name: str, data_source: str | None) -> GivenRows | None:
    if given is None or file_names(given) is not None:
        return None
    columns = {"prompt_key": config.data.prompt_key, "reward_fn_key": config.data.reward_fn_key}
    return GivenRows(name, [with_defaults(row, **columns, data_source=data_source) for row in rows_of(given, name)])
