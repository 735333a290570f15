"""Compose the configuration with Hydra and validate it with the schema: overrides -> one frozen Config."""

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, overload

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from rloom.config import keys
from rloom.config.base import EMBEDDED_NAME, RunConfig
from rloom.config.checks import check
from rloom.config.derived import brings_own_algorithm, declared_needs
from rloom.config.frontends import smoke
from rloom.config.frontends.smoke import smoke_settings, torchrun_settings
from rloom.config.given_keys import (
    Tree,
    default_tree,
    entries,
    given_in_files,
    in_real_spelling,
    known,
    leaf_keys,
    nested,
    put,
    real_key,
    unset_tree,
)
from rloom.config.keys import Root, all_keys, value_at
from rloom.config.schema import Config, SftConfig
from rloom.config.verl_keys import without_one_behaviour
from rloom.errors import ConfigError

COMMON = ("train", "training", "data")  # names of files that say less than the name of their folder
LONGEST_PART = 60  # bytes


def experiment_name(model: Any, algorithm: Any, files: Any) -> str:
    """Values of keys that are not validated yet. `algorithm`: a name, or `file.py:name`; `files`: one or a list."""
    listed = files if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    data = dict.fromkeys(data_name(str(file)) for file in listed)
    parts = (PurePosixPath(str(model)).name, str(algorithm).rpartition(":")[2], "-".join(data))
    return "_".join(file_name(part) for part in parts)


def data_name(file: str) -> str:
    path = PurePosixPath(file)
    return path.parent.name if path.stem.lower() in COMMON and path.parent.name else path.stem


def file_name(text: str) -> str:
    """A part of a folder's name, in lower case, since some file systems do not distinguish upper and lower case."""
    safe = re.sub(r"[^\w.-]+", "-", text.lower()).encode()[:LONGEST_PART].decode(errors="ignore")
    return safe.strip("-.") or "run"


PACKAGED = Path(__file__).parent
ENGINE = "actor_rollout_ref.rollout.name"
DIRECTORY, JUDGE_CACHE = "trainer.default_local_dir", "reward_model.api.cache_dir"
VALUES = "+values@_global_=given"  # the argument that makes Hydra compose the stored values after all files
HYDRAS_OWN = ("hydra", "preset", "values")  # names of Hydra and of our groups of files
COMMANDS = ("ppo_trainer", "sft_trainer")  # packaged files: the schema, a preset, and nothing else
packaged: dict[tuple[str, str], bytes] = {}  # preset, schema -> pickled tree; a copy is made for each composition
C = TypeVar("C", bound=RunConfig)
Compose = Callable[..., tuple[C, bool]]  # further arguments of Hydra -> the configuration, whether it takes presets


def load_config(
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    /,
    *,
    config_path: str | None = None,
    config_name: str = "ppo_trainer",
) -> Config:
    """Compose the packaged configuration, or the user's YAML on top of it, with `key=value` overrides.

    `values`: dotted keys with values that are not in Hydra's grammar. They override files, and `overrides` override
    them. With RLOOM_SMOKE=1 in the environment, a tiny model and data override all of them.
    """
    if not smoke.is_on(os.environ):
        return compose_config(overrides, values, config_path, config_name)
    config = compose_config(overrides, values, config_path, config_name)
    if not brings_own_algorithm(config):  # its requirements are known after its file is loaded
        check(config, declared_needs(config))
    available = smoke.examine(os.environ)
    changes = smoke.replacements(config, available)
    print(smoke.description(config, changes, available), flush=True)
    return with_changes(config, changes)


def with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """`changes`: dotted keys. They do not count as given by the user."""
    return replaced(config, changes, smoke.still_given(config, changes))


def replaced(config: C, changes: Mapping[str, Any], given: frozenset[str]) -> C:
    # section by section: the dump of a whole Config has values that depend on which keys were given
    tree = {name: getattr(config, name).model_dump() for name in type(config).model_fields}
    for path, value in changes.items():
        put(tree, path, value)
    return validate(tree, given=given, one_behaviour=config.one_behaviour, root=type(config))


def default_name(*keys: str, _root_: DictConfig) -> str:
    """`${experiment_name:...}`, the default of that key: by values of keys, or by a word that is no key."""
    try:
        return experiment_name(*(OmegaConf.select(_root_, key, default=key) for key in keys))
    except OmegaConfBaseException:
        return "run"  # a section is not one; validation reports it


OmegaConf.register_new_resolver("experiment_name", default_name, replace=True)


def moved(config: C, directory: str, experiment: str) -> C:
    """The same run in another directory. Outputs in the directory, such as the judge's cache, move with it."""
    before = config.trainer.default_local_dir
    outputs = leaf_keys(type(config)).keys() & {DIRECTORY, JUDGE_CACHE, *config.trainer.output_folders}
    texts = {path: value for path in outputs if isinstance(value := value_at(config, path), str)}
    below = {path: text for path, text in texts.items() if f"{text}/".startswith(f"{before}/")}
    changes = {path: f"{directory}{text.removeprefix(before)}" for path, text in below.items()}
    return replaced(config, {**changes, "trainer.experiment_name": experiment}, config.given)


def renamed(config: Config) -> Config:
    """Named by its model, algorithm and data, if the user did not name it: those may have changed."""
    trainer, model = config.trainer, config.actor_rollout_ref.model.path
    name = experiment_name(model, config.algorithm.adv_estimator, config.data.train_files)
    if name == trainer.experiment_name or config.is_given("trainer.experiment_name"):
        return config
    parent, _, last = trainer.default_local_dir.rpartition("/")
    follows = last == trainer.experiment_name and not config.is_given("trainer.default_local_dir")
    return moved(config, f"{parent}/{name}" if follows else trainer.default_local_dir, name)


def compose_config(
    overrides: Sequence[str], values: Mapping[str, Any] | None, config_path: str | None, config_name: str
) -> Config:
    composed = composer(Config, overrides, values, config_path, config_name)
    config, takes_presets = composed()
    rollout, engine = config.actor_rollout_ref.rollout, []
    if rollout.tensor_model_parallel_size > 1 and not config.is_given(ENGINE):
        engine = [f"++{ENGINE}=vllm"]  # native, the default, has no tensor parallelism
        config, _ = composed(*engine)
    model = config.actor_rollout_ref.model.path
    preset: list[str] = []
    if takes_presets and has_embedded_shape(model):
        preset = ["preset=embedded" if config.data.train_files == EMBEDDED_NAME else "preset=embedded_model"]
        config, _ = composed(*engine, *preset)
    lengths = fitting_lengths(config, model_file(model).get("max_position_embeddings"))
    return composed(*engine, *preset, *lengths)[0] if lengths else config


EMBEDDED_MODEL = PACKAGED.parent / "assets" / "embedded" / "model"
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
LENGTHS = ("data.max_prompt_length", "data.max_response_length")


def model_file(model: str) -> dict[str, Any]:
    """config.json of a model's folder; empty for a hub name, and where a later check reports the fault."""
    folder = EMBEDDED_MODEL if model == EMBEDDED_NAME else expand(model)
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def has_embedded_shape(model: str) -> bool:
    """The embedded model, or a folder with a model of its size: one that was trained from it and exported."""
    if model == EMBEDDED_NAME:
        return True
    own = model_file(model)
    return bool(own) and all(own.get(name) == value for name, value in embedded_shape().items())


@lru_cache(maxsize=1)
def embedded_shape() -> dict[str, Any]:
    fields = model_file(EMBEDDED_NAME)
    return {name: fields[name] for name in SHAPE}


def fitting_lengths(config: Config, context: Any) -> list[str]:
    """Lengths of prompt and answer that the model supports together, where the user has not set them."""
    prompt, answer = config.data.max_prompt_length, config.data.max_response_length
    if not isinstance(context, int) or config.data.longest_sample <= context:
        return []
    match [config.is_given(name) for name in LENGTHS]:
        case [False, False]:
            answer = min(answer, context // 2)
            prompt = context - answer
        case [True, False]:
            answer = context - prompt
        case [False, True]:
            prompt = context - answer
        case _:
            return []
    # where a given length leaves no room, the check of the model's context reports it
    return [f"++{LENGTHS[0]}={prompt}", f"++{LENGTHS[1]}={answer}"] if prompt > 0 and answer > 0 else []


def load_sft_config(
    overrides: Sequence[str] = (), /, *, config_path: str | None = None, config_name: str = "sft_trainer"
) -> SftConfig:
    """The same for `rloom sft`. torchrun's number of workers and a smoke run replace keys."""
    composed = composer(SftConfig, overrides, None, config_path, config_name)
    config, takes_presets = composed()
    settings = [*torchrun_settings(config), *smoke_settings(config)]
    config, _ = composed(*settings)
    if takes_presets and has_embedded_shape(config.model.path):
        preset = "preset=sft_embedded" if config.data.train_files == EMBEDDED_NAME else "preset=sft_embedded_model"
        return composed(*settings, preset)[0]
    return config


def composer(
    root: type[C],
    overrides: Sequence[str],
    values: Mapping[str, Any] | None,
    config_path: str | None,
    config_name: str,
) -> Compose[C]:
    """A function that composes the files and these overrides with further arguments of Hydra."""
    config_name = config_name.removesuffix(".yaml")
    folder, arguments = check_source(config_path, config_name), [as_addition(text, root) for text in overrides]
    typed = given_on_command_line(arguments, root)
    set_values = [] if values is None else store_values(values)
    written: frozenset[str] = frozenset()
    if folder != PACKAGED:
        unset, _ = compose(folder, config_name, [], schema=unset_tree(root), resolve=False)
        written = given_in_files(unset, root)

    def composed(*further: str) -> tuple[C, bool]:
        tree, takes_presets = compose(
            folder, config_name, [*set_values, *arguments, *further], schema=default_tree(root)
        )
        given = typed | written | known(values or (), root)
        tree, notices = without_one_behaviour(in_real_spelling(tree, typed, root))
        return validate(tree, given=given, one_behaviour=notices, root=root), takes_presets

    return composed


def store_values(values: Mapping[str, Any]) -> list[str]:
    """The arguments that make Hydra compose these values after all files."""
    ConfigStore.instance().store(group="values", name="given", node=nested({k: literal(v) for k, v in values.items()}))
    return [VALUES]


def literal(value: Any) -> Any:
    """Text with `${`, which OmegaConf would resolve, escaped; backslashes before it too."""
    if isinstance(value, dict):
        return {name: literal(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [literal(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def overrides_tree(overrides: Sequence[str], root: Root = Config) -> Tree:
    """`key=value` pairs as a separate tree, for a configuration that Hydra does not compose."""
    tree = OmegaConf.create({})
    try:
        for text in overrides:
            read = parsed(as_addition(text, root))
            OmegaConf.update(tree, read.key_or_group, read.value(), force_add=True)
        found = OmegaConf.to_container(tree, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"the overrides cannot be read: {str(error).strip()}") from error
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def check_source(config_path: str | None, config_name: str) -> Path:
    """The folder of the YAML file. verl's `config` is the folder of its own files: one that is not here is rloom's."""
    folder = Path(config_path).expanduser().resolve() if config_path else PACKAGED
    if config_path is not None and Path(config_path) == Path("config") and not folder.is_dir():
        folder = PACKAGED
    if not (folder / f"{config_name}.yaml").is_file():
        raise ConfigError(f"--config-name={config_name}: there is no such YAML file in {folder}")
    return folder


def as_addition(override: str, root: Root = Config) -> str:
    """`key=value` as Hydra's `++key=value`: the schema, not Hydra, decides which keys exist."""
    if override.startswith("~"):
        raise ConfigError(f"{override}: keys cannot be removed; set the key to another value")
    name, equals, value = override.lstrip("+").partition("=")
    if not name or not equals:
        raise ConfigError(f"{override!r} is not a key=value pair; `{root.listing}` lists the keys")
    if name.split(".")[0] in HYDRAS_OWN:
        raise ConfigError(f"{name}: there is no such key (`{root.listing}` lists them all)")
    name = real_key(name, root)
    if value.startswith("~/"):  # Hydra's grammar does not accept it without quotes
        value = f"'{value}'"
    check_grammar(name, value)
    check_no_list_above(name, root)
    return f"++{name}={value}"


def check_no_list_above(name: str, root: Root) -> None:
    """`trainer.logger.x`: where trainer.logger holds a list, OmegaConf reads `x` as an index."""
    parts = name.split(".")
    for parent in (".".join(parts[:length]) for length in range(1, len(parts))):
        key = all_keys(root).get(parent)
        if key is not None and not {"list", "tuple"}.isdisjoint(key.kind.split(" or ")):
            raise ConfigError(f"{name}: {parent} takes {key.kind} and has no keys below it; set {parent} itself")


def given_on_command_line(arguments: Sequence[str], root: Root) -> frozenset[str]:
    """The keys that `++key=value` arguments set; a dictionary sets the keys in it."""
    read = [parsed(text) for text in arguments]
    paths = (entry.path for one in read for entry in entries({one.key_or_group: one.value()}, root=root))
    return known(paths, root)


@lru_cache(maxsize=1024)
def parsed(override: str) -> Override:
    """Each is needed several times, and parsing takes most of the time of composing."""
    return OverridesParser.create().parse_override(override)


def check_grammar(name: str, value: str) -> None:
    try:
        read = parsed(f"++{name}={value}")
    except HydraException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{name}={value}: the value cannot be read ({reason}); put it in quotes within quotes: \"{name}='{value}'\""
        ) from error
    if read.is_sweep_override():
        raise ConfigError(
            f'{name}={value}: one run takes one value; write a list as "{name}=[{value}]", text as "{name}=\'{value}\'"'
        )


def compose(folder: Path, name: str, overrides: list[str], *, schema: Tree, resolve: bool = True) -> tuple[Tree, bool]:
    """The tree, and whether it uses presets: a YAML file without `defaults` does not."""
    try:
        found = on_packaged_files(name, overrides, schema) if folder == PACKAGED else None
        composed, takes_presets = found or by_hydra(folder, name, overrides, schema)
        tree = OmegaConf.to_container(composed, resolve=resolve)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration cannot be read: {str(error).strip()}") from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}, takes_presets


def by_hydra(folder: Path, name: str, overrides: Sequence[str], schema: Tree) -> tuple[DictConfig, bool]:
    ConfigStore.instance().store(name="schema", node=schema)
    search = [f"hydra.searchpath=[file://{PACKAGED}]"]  # makes ppo_trainer available to the user's YAML
    with hydra.initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        composed = hydra.compose(config_name=name, overrides=[*search, *overrides], return_hydra_config=True)
    OmegaConf.set_struct(composed, False)
    choices = composed.pop("hydra").runtime.choices
    return composed, "preset" in choices


def on_packaged_files(name: str, overrides: Sequence[str], schema: Tree) -> tuple[DictConfig, bool] | None:
    """What `by_hydra` returns, in a fraction of its time: the keys are set on the packaged values. None where Hydra has
    to decide: another file, a key of no section, a value that cannot be merged."""
    if name not in COMMANDS:
        return None
    preset = next((text.partition("=")[2] for text in overrides if not text.startswith("+")), "none")
    source = (preset, repr(schema))
    if source not in packaged:
        packaged[source] = pickle.dumps(OmegaConf.merge(schema, preset_values(preset)))
    composed = pickle.loads(packaged[source])
    try:
        if VALUES in overrides:
            given = ConfigStore.instance().load("values/given.yaml").node
            if not set(given) <= set(schema):
                return None
            composed.merge_with(given)
        for read in (parsed(text) for text in overrides if text.startswith("++")):
            if read.package is not None or read.key_or_group.split(".")[0] not in schema:
                return None
            OmegaConf.update(composed, read.key_or_group, read.value(), merge=True, force_add=True)
    except OmegaConfBaseException:
        return None
    return composed, True


def preset_values(name: str) -> Any:
    """A file of preset/, on top of those that its `defaults` name."""
    values = OmegaConf.load(PACKAGED / "preset" / f"{name}.yaml")
    assert isinstance(values, DictConfig)
    below = [preset_values(other) for other in values.pop("defaults", ()) if other != "_self_"]
    return OmegaConf.merge(*below, values)


@overload
def validate(tree: Tree, given: frozenset[str] = ..., one_behaviour: Sequence[str] = ...) -> Config: ...


@overload
def validate(tree: Tree, given: frozenset[str] = ..., one_behaviour: Sequence[str] = ..., *, root: type[C]) -> C: ...


def validate(
    tree: Tree, given: frozenset[str] = frozenset(), one_behaviour: Sequence[str] = (), *, root: Root = Config
) -> RunConfig:
    try:
        return root.model_validate(tree, context={"given": given, "one_behaviour": one_behaviour})
    except ValidationError as error:
        raise ConfigError("\n".join(keys.sentences(error, root))) from None


def expand(path: str) -> Path:
    """A path with ~ and environment variables expanded, as in a shell."""
    return Path(os.path.expandvars(path)).expanduser()
