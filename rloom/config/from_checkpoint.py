"""The configuration saved in a checkpoint. It is data: the user must repeat every key whose field `needs_consent`,
because it would run code, contact a server, spend money or write files.

The file is read as plain YAML. Hydra does not compose it, so a `defaults` list, a search path or an interpolation such
as `${oc.env:NAME}` in it has no effect.
"""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rloom.config.base import ACTOR, CRITIC, REF, NeedsConsent, RunConfig
from rloom.config.given_keys import default_tree, leaf_keys, nested, override_value
from rloom.config.keys import Root
from rloom.config.load import C, overrides_tree, validate
from rloom.config.schema import Config, SftConfig
from rloom.config.sections import SIZES
from rloom.errors import ConfigError
from rloom.rewards.kinds import OWN_KEY
from rloom.runs.run_folder import CONFIG_FILE

MEGATRON_ROLES = {ACTOR: "1", CRITIC: "1", REF: "null"}  # -> parallel sizes
ONE_WORKER = ("trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.node_rank=0")
ONE_PROCESS = (  # replaces the run's values
    *ONE_WORKER,
    "trainer.pools={actor: null, critic: null, ref: null, rollout: null, reward: null}",
    "trainer.v1.trainer_mode=sync",
    "trainer.replay=null",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
    "critic.model.fsdp_config.fsdp_size=-1",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    "critic.ulysses_sequence_parallel_size=1",
    *(f"{role}.megatron.{size}={value}" for role, value in MEGATRON_ROLES.items() for size in SIZES[:-1]),
    *(f"{role}.megatron.{SIZES[-1]}=null" for role in MEGATRON_ROLES),
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)
SFT_ONE_PROCESS = (*ONE_WORKER, "engine.fsdp_size=-1", "engine.ulysses_sequence_parallel_size=1")
RUN_ALONE = ("critic.", "trainer.", "ray_kwargs.")  # evaluation and export build no critic, log nothing, start no Ray


def consent_keys(root: Root = Config) -> dict[str, NeedsConsent]:
    return {path: key.needs_consent for path, key in leaf_keys(root).items() if key.needs_consent is not None}


STRATEGY, CRITICS_STRATEGY = f"{ACTOR}.strategy", f"{CRITIC}.strategy"  # the actor's engine reads the weights
# the check of the keys reads what the critic's strategy declares
EVALUATION = tuple(path for path in consent_keys() if not path.startswith(RUN_ALONE) or path == CRITICS_STRATEGY)
MODEL_ALONE = (*(path for path in consent_keys() if path.startswith("actor_rollout_ref.model.")), STRATEGY)
SFT_MODEL_ALONE = tuple(path for path in consent_keys(SftConfig) if path.startswith("model."))


class NoAliases(yaml.SafeLoader):
    """Refuses aliases: rloom writes none, and a few lines of nested aliases can expand to any amount of memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it holds a YAML alias, which rloom never writes")
        return super().compose_node(parent, index)


def load_saved(
    checkpoint: Path,
    overrides: Sequence[str] = (),
    *,
    uses: Collection[str] = EVALUATION,
    settings: Sequence[str] = (),
) -> Config:
    """The configuration of the run that wrote a checkpoint, with the checkpoint as the model's path. Of a run of
    `rloom sft`: its model, and the defaults.

    `uses`: of the keys that need consent, those that have an effect in what the caller does. `settings`: overrides by
    the caller.
    """
    config = load_tree(checkpoint, overrides, Config, "actor_rollout_ref.model.path", [*ONE_PROCESS, *settings])
    check_consent(checkpoint / CONFIG_FILE, config, named=overrides_tree(overrides), uses=uses)
    return config


def run_directory_of(checkpoint: Path) -> str:
    """A setting: servers write their logs there. The run's folder on another machine may be any folder of this one."""
    return f"trainer.default_local_dir={override_value(str(checkpoint.absolute().parent))}"


def load_saved_sft(checkpoint: Path, overrides: Sequence[str] = (), *, settings: Sequence[str] = ()) -> SftConfig:
    """The same for a checkpoint of `rloom sft`."""
    config = load_tree(checkpoint, overrides, SftConfig, "model.path", [*SFT_ONE_PROCESS, *settings])
    named = overrides_tree(overrides, SftConfig)
    check_consent(checkpoint / CONFIG_FILE, config, named=named, uses=SFT_MODEL_ALONE)
    return config


def load_tree(checkpoint: Path, overrides: Sequence[str], root: type[C], model_key: str, settings: Sequence[str]) -> C:
    tree = policy_tree(checkpoint) if root is Config else read_saved(checkpoint / CONFIG_FILE, root)
    whole = checkpoint / "actor" / "model.safetensors"  # with LoRA only the adapter is saved
    if whole.is_file():
        tree = merge_trees(tree, nested({model_key: str(whole.parent.absolute())}))
    tree = merge_trees(tree, overrides_tree(settings, root))
    return validate(merge_trees(tree, overrides_tree(overrides, root)), root=root)


def policy_tree(checkpoint: Path) -> dict[str, Any]:
    """The saved tree. That of `rloom sft` becomes one whose policy is its model: prompts and answers are together as
    long as its rows."""
    if saved_root(checkpoint) is Config:
        return read_saved(checkpoint / CONFIG_FILE)
    trained = validate(read_saved(checkpoint / CONFIG_FILE, SftConfig), root=SftConfig)
    answer = max(1, trained.data.max_length // 2)
    data = {
        "max_prompt_length": max(1, trained.data.max_length - answer),
        "max_response_length": answer,
        "apply_chat_template_kwargs": trained.data.apply_chat_template_kwargs,
    }
    model = trained.model.model_dump(mode="json")
    return merge_trees(default_tree(), {"actor_rollout_ref": {"model": model}, "data": data})


def saved_root(checkpoint: Path) -> Root:
    """The kind of training that wrote a checkpoint, by the sections of its configuration."""
    sections = read_yaml(checkpoint / CONFIG_FILE).keys()
    return SftConfig if sections <= SftConfig.model_fields.keys() else Config


def read_saved(file: Path, root: Root = Config) -> dict[str, Any]:
    """The tree in a checkpoint's file, validated."""
    tree = read_yaml(file)
    try:
        validate(merge_trees(tree, {}), root=root)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return tree


def config_text(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), NoAliases)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).strip() or type(error).__name__
        raise ConfigError(f"{file} cannot be read: {reason}; take another checkpoint") from error
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(f"{file} cannot be read: it holds no configuration; take another checkpoint")
    return tree


def merge_trees(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with the changes merged in, section by section."""
    found = {name: merge_trees(value, {}) if isinstance(value, dict) else value for name, value in tree.items()}
    for name, value in changes.items():
        section = found.get(name)
        found[name] = merge_trees(section, value) if isinstance(section, dict) and isinstance(value, dict) else value
    return found


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of sections and of the keys in them."""
    for name, value in tree.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")


def other_training(file: Path, config: RunConfig) -> dict[str, Any]:
    """The saved values of the keys in which another run was trained than this one: all but those of `same_run`."""
    return saved_differences(file, config, [path for path, key in leaf_keys(type(config)).items() if not key.same_run])


def saved_differences(file: Path, config: RunConfig, paths: Iterable[str]) -> dict[str, Any]:
    """The saved values of these keys that differ from the configuration's."""
    saved, keys = saved_values(file, file.stat().st_mtime_ns), leaf_keys(type(config))
    own = dict(flattened(config.model_dump(mode="json")))
    # a key that the saved file does not have was added to rloom after it, and is as it was at its default
    was = {path: saved.get(path, keys[path].default) for path in paths}
    return {path: value for path, value in was.items() if value != own[path]}


@lru_cache(maxsize=256)
def saved_values(file: Path, written_ns: int) -> dict[str, Any]:
    """Each is needed several times, and reading one takes 30 ms."""
    return dict(flattened(read_yaml(file)))


def check_consent(file: Path, config: RunConfig, *, named: Mapping[str, Any], uses: Collection[str]) -> None:
    """`named`: the tree of the keys that the user repeated."""
    values, repeated = dict(flattened(config.model_dump(mode="json"))), dict(flattened(named))
    checks = consent_keys(type(config))
    # the keys of a section that is not enabled have no effect, apart from those that the check of the keys loads
    loaded = (OWN_KEY, CRITICS_STRATEGY)
    has_effect = [key for key in uses if key in loaded or values.get(f"{key.rpartition('.')[0]}.enable") is not False]
    if values.get(CRITICS_STRATEGY) == values.get(STRATEGY):  # the critic's default, which the actor's name allows
        has_effect = [key for key in has_effect if key != CRITICS_STRATEGY]
    # compare whole values: the file may add entries to a mapping that the user named
    untrusted = [key for key in has_effect if checks[key](values[key]) and repeated.get(key) != values[key]]
    if untrusted:
        listed = ", ".join(f"{key}={values[key]}" for key in untrusted)
        allow = " ".join(shlex.quote(f"{key}={override_value(values[key])}") for key in untrusted)
        raise ConfigError(
            f"{file} sets keys that run code, contact a server, spend money or write files: {listed}. A checkpoint is "
            f"not trusted to do that. If you trust it, add to the command: {allow}"
        )
