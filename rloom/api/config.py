"""The configuration, from what a Python program has: keys in a mapping, `key=value` texts, a YAML file."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeGuard, Unpack

from rloom.config import load
from rloom.config.from_checkpoint import merge_trees
from rloom.config.frontends import trl
from rloom.config.frontends.short_names import SHORT_NAMES, short_values
from rloom.config.given_keys import entries, known, nested
from rloom.config.load import HYDRAS_OWN, expand, validate
from rloom.config.schema import Config, usual_answers
from rloom.errors import ConfigError
from rloom.language import translate

logger = logging.getLogger(__name__)
__all__ = ["Config", "Keys", "ShortKeys", "Source", "changed", "from_trl", "load_config"]

Keys = Mapping[str, Any] | Sequence[str]
Source = Config | Keys | str | Path | None

FORMS = (
    'a mapping such as {"algorithm.adv_estimator": "grpo"}, a list of "key=value" texts, the path of a YAML file, '
    "or a Config"
)


class ShortKeys(TypedDict, total=False):
    """The short names of keys (rloom/config/frontends/short_names.py) as keyword arguments. None: not given."""

    model: str | Path | None
    algorithm: str | None
    lr: float | None
    critic_lr: float | None
    n: int | None
    batch: int | None
    mini_batch: int | None
    steps: int | None
    epochs: int | None
    max_prompt_length: int | None
    max_response_length: int | None
    temperature: float | None
    kl_coef: float | None
    kl_loss_coef: float | None
    clip_ratio: float | None
    entropy_coeff: float | None
    lora_rank: int | None
    rollout: str | None
    trainer_mode: str | None
    n_gpus: int | None
    seed: int | None
    save_freq: int | None
    test_freq: int | None
    output_dir: str | Path | None


def load_config(source: Source = None, keys: Keys = (), **short: Unpack[ShortKeys]) -> Config:
    """The configuration of `source`, with `keys` and keys by their short names (`lr=1e-6`) on top of it. None: the
    embedded model on the embedded data."""
    check_names(short, "load_config")
    base = composed(source, keys)
    values, further = short_values(short)
    own = {key: value for key, value in further.items() if not base.is_given(key)}
    return with_keys(source, keys, {**own, **values}) if values else base


def from_trl(args: Any, *, algorithm: str | None = None, devices: int | None = None) -> dict[str, Any]:
    """The keys of a GRPOConfig, RLOOConfig or SFTConfig of TRL, or of a dict of its fields (of SFTConfig: keys of
    `rloom sft`). `devices`: on how many it trains; by default the visible GPUs, or 1. A field that rloom does not have
    is an error that says what to do instead; one that it does not know is an error in a dict. Of an object, such fields
    are named in a warning if they were set, and those that only change files, speed or output are left out."""
    return settings_of_trl(args, algorithm, devices).values


def settings_of_trl(args: Any, algorithm: str | None, devices: int | None) -> trl.TrlSettings:
    found = trl.translate(args, algorithm=algorithm, devices=devices)
    for notice in found.notices:
        logger.warning(translate(f"Note: {notice}"))
    return found


def check_names(given: Mapping[str, Any], function: str, *others: str) -> None:
    """`given`: keyword arguments. `others`: names that are not short names of keys."""
    names = [*ShortKeys.__annotations__, *others]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise ConfigError(f"rloom.{function}: {trl.unknown_argument(unknown, names)}")


def with_keys(source: Source, keys: Keys, values: Mapping[str, Any]) -> Config:
    """`values`: dotted keys of keyword arguments. Those of a mapping or of texts must not have other values."""
    written = {**key_values(source if is_keys(source) else ()), **key_values(keys)}
    for key, value in flat(values).items():
        if key in written and written[key] != value:
            raise ConfigError(f"{key}={written[key]!r} and {argument_of(key)}={value!r} are both given; keep one")
    if isinstance(source, Config):
        return changed(source, {**key_values(keys), **flat(values)})
    if is_keys(source):
        return composed({**written, **flat(values)})
    return composed(source, {**key_values(keys), **flat(values)})


def is_keys(source: Source) -> TypeGuard[Keys]:
    return isinstance(source, Mapping | list | tuple)


def argument_of(key: str) -> str:
    """The keyword argument that sets a key."""
    return next((name for name, short in SHORT_NAMES.items() if short.key == key), key)


def composed(source: Source, keys: Keys = ()) -> Config:
    if isinstance(source, Config):
        return changed(source, key_values(keys)) if keys else source
    if isinstance(source, str | Path):
        return from_file(expand(str(source)), keys)
    if source is None:
        source, keys = keys, ()
    if isinstance(source, Mapping):
        if isinstance(keys, Mapping):
            return load.load_config((), flat(source) | flat(keys))
        return load.load_config(keys, flat(source))
    if isinstance(keys, Mapping):
        raise ConfigError('keys is a mapping and the configuration a list of "key=value" texts; use one form for both')
    return load.load_config([*texts(source), *keys])


def from_file(file: Path, keys: Keys) -> Config:
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{str(file)!r} is not the path of a YAML file; the configuration is {FORMS}")
    if file.suffix == ".yml" or not file.is_file():
        raise ConfigError(f"{file}: there is no such file, or its name does not end in .yaml")
    overrides, values = ((), flat(keys)) if isinstance(keys, Mapping) else (texts(keys), None)
    return load.load_config(overrides, values, config_path=str(file.parent), config_name=file.stem)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values of some keys."""
    # section by section: the dump of a whole Config has values that depend on which keys were given
    tree = {name: getattr(config, name).model_dump(mode="json") for name in Config.model_fields}
    answers = config.actor_rollout_ref.rollout.n
    if not config.is_given("actor_rollout_ref.rollout.n") and answers == usual_answers(config.algorithm.adv_estimator):
        tree["actor_rollout_ref"]["rollout"]["n"] = None  # the number that another estimator needs
    return load.renamed(validate(merge_trees(tree, nested(values)), given=config.given | known(values)))


def key_values(keys: Keys) -> dict[str, Any]:
    if isinstance(keys, Mapping):
        return flat(keys)
    return {entry.path: entry.value for entry in entries(load.overrides_tree(texts(keys)))}


def texts(given: Any) -> list[str]:
    found = list(given) if isinstance(given, Sequence) else None
    if found is None or not all(isinstance(text, str) for text in found):
        raise ConfigError(f"{given!r} is not a configuration; it is {FORMS}")
    return found


def flat(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys with plain values, of a mapping with dotted or nested keys."""
    found: dict[str, Any] = {}
    for entry in entries(to_json_value(keys)):
        if entry.path in found:
            raise ConfigError(f"{entry.path}: written twice, in two spellings; keep one")
        if entry.path.split(".")[0] in HYDRAS_OWN:
            raise ConfigError(f"{entry.path}: there is no such key (`rloom config` lists them all)")
        found[entry.path] = entry.value
    return found


def to_json_value(value: Any) -> Any:
    """As YAML has it: a Path is its text, a tuple is a list."""
    if isinstance(value, Mapping):
        return {str(name): to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
