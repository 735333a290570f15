"""Hydra composes, the schema judges: overrides -> one frozen Config, or an error that names the key."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rloom.config.keys import all_keys, nearest
from rloom.config.schema import Config
from rloom.errors import ConfigError

PACKAGED = Path(__file__).parent
EMBEDDED = "embedded"
HYDRAS_OWN = ("hydra", "preset")  # names that Hydra would take for itself

# Keys of later versions: what a user who sets one is waiting for.
NOT_YET = {
    "reward_model.enable": "reward models",
    "reward_model.path": "reward models",
    "reward_model.model": "reward models",
    "reward_model.micro_batch_size_per_gpu": "reward models",
    "reward_model.reward_manager": "other reward managers",
    "reward_model.api": "API judges",
    "reward_model.composite": "mixes of rewards",
    "reward_model.sandbox": "code rewards",
    "actor_rollout_ref.actor.megatron": "Megatron engines",
    "actor_rollout_ref.actor.megatron_config": "Megatron engines",
    "critic.megatron_config": "Megatron engines",
}
# Values of such keys that ask for nothing else than what this version does.
MEANS_WHAT_WE_DO = {"reward_model.enable": False, "reward_model.reward_manager": "naive"}


def load_config(
    overrides: Sequence[str] = (), *, config_path: str | None = None, config_name: str = "ppo_trainer"
) -> Config:
    """Compose the packaged configuration, or the user's own YAML on top of it, with `key=value` overrides."""
    folder, arguments = check_source(config_path, config_name), [as_addition(text) for text in overrides]
    tree, takes_presets = compose(folder, config_name, arguments)
    config = validate(tree)
    if takes_presets and config.actor_rollout_ref.model.path == EMBEDDED:
        preset = "embedded" if config.data.train_files == EMBEDDED else "embedded_model"
        tree, _ = compose(folder, config_name, [*arguments, f"preset={preset}"])
        config = validate(tree)
    return config


def overrides_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs as a tree of their own, for a configuration that Hydra does not compose."""
    tree = OmegaConf.create({})
    try:
        for text in overrides:
            read = OverridesParser.create().parse_override(as_addition(text))
            OmegaConf.update(tree, read.key_or_group, read.value(), force_add=True)
        found = OmegaConf.to_container(tree, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the overrides cannot be read: {str(error).strip()}") from error
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def check_source(config_path: str | None, config_name: str) -> Path:
    folder = Path(config_path).expanduser().resolve() if config_path else PACKAGED
    if not (folder / f"{config_name.removesuffix('.yaml')}.yaml").is_file():
        raise ConfigError(f"--config-name={config_name}: there is no such YAML file in {folder}")
    return folder


def as_addition(override: str) -> str:
    """`key=value` as Hydra's `++key=value`: the schema, not Hydra, decides which keys exist."""
    if override.startswith("~"):
        raise ConfigError(f"{override}: keys cannot be removed; give the key the value you want instead")
    name, equals, value = override.lstrip("+").partition("=")
    if not name or not equals:
        raise ConfigError(f"{override!r} is not a key=value pair; `rloom config` lists the keys")
    if name.split(".")[0] in HYDRAS_OWN:
        raise ConfigError(f"{name}: there is no such key (`rloom config` lists them all)")
    if value.startswith("~/"):  # Hydra's grammar has no place for it, every shell user does
        value = f"'{value}'"
    check_grammar(name, value)
    return f"++{name}={value}"


def check_grammar(name: str, value: str) -> None:
    try:
        read = OverridesParser.create().parse_override(f"{name}={value}")
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{name}={value}: the value cannot be read ({reason}); put it in quotes within quotes: \"{name}='{value}'\""
        ) from error
    if read.is_sweep_override():
        raise ConfigError(
            f'{name}={value}: one run takes one value; write a list as "{name}=[{value}]", text as "{name}=\'{value}\'"'
        )


def compose(folder: Path, name: str, overrides: list[str]) -> tuple[dict[str, Any], bool]:
    """The tree, and whether it has a place for presets: a YAML file without `defaults` stands by itself."""
    ConfigStore.instance().store(name="schema", node=Config().model_dump(mode="json"))
    search = [f"hydra.searchpath=[file://{PACKAGED}]"]  # so that a user's YAML finds ppo_trainer
    try:
        with hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            composed = hydra.compose(config_name=name, overrides=[*search, *overrides], return_hydra_config=True)
        OmegaConf.set_struct(composed, False)
        choices = composed.pop("hydra").runtime.choices
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration cannot be read: {str(error).strip()}") from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}, "preset" in choices


def validate(tree: dict[str, Any]) -> Config:
    for path, value in MEANS_WHAT_WE_DO.items():
        section, name = path.split(".")
        if isinstance(tree.get(section), dict) and tree[section].get(name) == value:
            del tree[section][name]
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        faults: dict[str, str] = {}  # one line a key: a union reports each of its members
        for fault in error.errors():
            path, text = describe_fault(fault)
            faults.setdefault(path, text)
        raise ConfigError("\n".join(faults.values())) from None


def describe_fault(fault: Any) -> tuple[str, str]:
    """(key, what is wrong with it) for one entry of pydantic's report."""
    keys = all_keys()
    location = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        path = deepest(".".join(location), fault["input"])
        later = next((what for start, what in NOT_YET.items() if f"{path}.".startswith(f"{start}.")), None)
        if later is not None:
            return path, f"{path}={fault['input']!r}: {later} are not in this version of rloom; leave the key out"
        guess = nearest(path)
        hint = f"; did you mean {guess}?" if guess else ""
        return path, f"{path}: there is no such key{hint} (`rloom config` lists them all)"
    while ".".join(location) not in keys:  # pydantic appends the member of a union that it tried
        location.pop()
    path = ".".join(location)
    found = keys[path]
    takes = f"it takes {found.kind}, by default {found.default}" if found.section is None else "it is a section of keys"
    return path, f"{path}={fault['input']!r}: {fault['msg'].lower()}; {takes}"


def deepest(path: str, value: Any) -> str:
    """The whole key of which `path` is only the first unknown part: `actor` -> `actor.optim.lr`."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        path = f"{path}.{name}"
    return path


def expand(path: str) -> Path:
    """A path as a user types it: ~ and environment variables mean what they mean in a shell."""
    return Path(os.path.expandvars(path)).expanduser()
