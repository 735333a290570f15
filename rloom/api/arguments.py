"""Rows and functions of the calling program in place of the files that keys name."""

from collections.abc import Callable, Mapping
from typing import Any

from rloom.api.config import Keys, Source, changed, flat, load_config
from rloom.config.base import GIVEN_IN_PYTHON
from rloom.config.schema import Config
from rloom.data.in_memory import rows_of, with_defaults
from rloom.data.prompts import GivenRows
from rloom.errors import ConfigError
from rloom.launch.early_checks import check
from rloom.launch.inputs import UserObjects
from rloom.rewards.function_reward import style_of

DATA_SOURCE = "custom"  # for rows without one, if a reward function is given
KEY_OF = {
    "train": "data.train_files",
    "validation": "data.val_files",
    "reward": "custom_reward_function.path",
}  # argument -> the key of the file that it replaces


def configured(
    source: Source, *, train: Any, validation: Any, reward: Callable[..., Any] | None
) -> tuple[Config, UserObjects]:
    """The checked configuration, and the objects that it refers to."""
    objects = {"train": train, "validation": validation, "reward": reward}
    replaced = {KEY_OF[name]: GIVEN_IN_PYTHON for name, value in objects.items() if value is not None}
    config = with_objects(source, replaced)
    if not config.is_given("trainer.resume_mode") and not config.is_given("trainer.resume_from_path"):
        # a cell of a notebook that runs again has often changed: it begins anew, and does not continue the last run
        config = changed(config, {"trainer.resume_mode": "disable"})
    if config.trainer.val_only or config.trainer.node_rank > 0:
        key = "val_only=True" if config.trainer.val_only else f"node_rank={config.trainer.node_rank}"
        raise ConfigError(f"trainer.{key}: use the command `rloom train` for this, or remove the key")
    config = check(config)
    if reward is not None:
        batch = config.reward_model.reward_manager == "batch"
        style_of(reward, config.custom_reward_function.reward_kwargs, whole_groups=batch)
    data_source = None if reward is None else DATA_SOURCE
    return config, UserObjects(
        train=given_rows(config, train, "train", data_source),
        validation=given_rows(config, validation, "validation", data_source),
        reward=reward,
    )


def with_objects(source: Source, replaced: Mapping[str, str]) -> Config:
    if isinstance(source, Config):
        twice, config = [key for key in replaced if source.is_given(key)], changed(source, replaced)
    elif isinstance(source, Mapping):
        twice, config = [key for key in replaced if key in flat(source)], load_config({**flat(source), **replaced})
    else:
        keys: Keys = [f"{key}='{value}'" for key, value in replaced.items()]
        twice, config = texts_of(source, replaced), load_config(source, keys)
    if twice:
        argument = next(name for name, key in KEY_OF.items() if key == twice[0])
        raise ConfigError(f"{twice[0]} and the argument {argument} are both given; keep one")
    return config


def texts_of(source: Source, replaced: Mapping[str, str]) -> list[str]:
    """The keys of `replaced` that a list of `key=value` texts sets."""
    texts = source if isinstance(source, list | tuple) else []
    return [key for key in replaced if any(text.lstrip("+").startswith(f"{key}=") for text in texts)]


def given_rows(config: Config, given: Any, name: str, data_source: str | None) -> GivenRows | None:
    if given is None:
        return None
    data = config.data
    return GivenRows(
        name,
        [
            with_defaults(row, prompt_key=data.prompt_key, reward_fn_key=data.reward_fn_key, data_source=data_source)
            for row in rows_of(given, name)
        ],
    )
