"""The configuration saved in a checkpoint. It is data: the user must repeat every key that would run code or send the
run's data and tokens to a server.

The file is read as plain YAML. Hydra does not compose it, so a `defaults` list, a search path or an interpolation such
as `${oc.env:NAME}` in it has no effect.
"""

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rloom.config.grammar import override_value
from rloom.config.keys import Root
from rloom.config.load import C, overrides_tree, validate
from rloom.config.run_config import RunConfig
from rloom.config.schema import IN_PYTHON, Config
from rloom.config.sft_schema import SftConfig
from rloom.config.sources import nested
from rloom.errors import ConfigError

CONFIG_FILE = "config.yaml"  # written to the run directory and to every checkpoint
MEGATRON_ROLES = {"actor_rollout_ref.actor": "1", "critic": "1", "actor_rollout_ref.ref": "null"}  # -> parallel sizes
ONE_PROCESS = (  # replaces the run's values
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "trainer.node_rank=0",
    "trainer.pools={actor: null, critic: null, ref: null, rollout: null, reward: null}",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",
    "critic.model.fsdp_config.fsdp_size=-1",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    "critic.ulysses_sequence_parallel_size=1",
    *(
        f"{role}.megatron.{size}={value}"
        for role, value in MEGATRON_ROLES.items()
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    ),
    *(f"{role}.megatron.expert_tensor_parallel_size=null" for role in MEGATRON_ROLES),
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)
SFT_ONE_PROCESS = (
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "trainer.node_rank=0",
    "engine.fsdp_size=-1",
    "engine.ulysses_sequence_parallel_size=1",
)
SFT_RUNS_CODE = "model.trust_remote_code"


def names_code(value: Any) -> bool:
    return ":" in value  # file.py:name, module:name


# key -> whether a value of it runs code, or names a server or what is sent to it. Evaluation and export build no critic
# and start no Ray.
RUNS_CODE: Mapping[str, Callable[[Any], bool]] = {
    "actor_rollout_ref.model.trust_remote_code": bool,
    "algorithm.adv_estimator": names_code,
    "actor_rollout_ref.actor.policy_loss.loss_mode": names_code,
    "custom_reward_function.path": lambda path: bool(path) and path != IN_PYTHON,  # that one is not in a file
    "reward_model.trust_remote_code": bool,
    "reward_model.model.trust_remote_code": bool,
    "reward_model.api.base_url": bool,
    "reward_model.api.api_key_env": bool,
    "reward_model.remote.urls": bool,
    "reward_model.remote.token_env": bool,
    "actor_rollout_ref.rollout.engine_kwargs": bool,  # generate() of transformers takes code as custom_generate
    "actor_rollout_ref.rollout.server.command": bool,
    "actor_rollout_ref.rollout.server.urls": bool,
    "actor_rollout_ref.rollout.server.key_env": bool,
}
EVALUATION = tuple(RUNS_CODE)
MODEL_ALONE = ("actor_rollout_ref.model.trust_remote_code",)


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
    """The configuration of the run that wrote a checkpoint, with the checkpoint as the model's path.

    `uses`: the keys of RUNS_CODE whose code the caller would run. `settings`: overrides by the caller.
    """
    config = load_tree(checkpoint, overrides, Config, "actor_rollout_ref.model.path", [*ONE_PROCESS, *settings])
    check_code(checkpoint / CONFIG_FILE, config, named=overrides_tree(overrides), uses={k: RUNS_CODE[k] for k in uses})
    return config


def load_saved_sft(checkpoint: Path, overrides: Sequence[str] = (), *, settings: Sequence[str] = ()) -> SftConfig:
    """The same for a checkpoint of `rloom sft`."""
    config = load_tree(checkpoint, overrides, SftConfig, "model.path", [*SFT_ONE_PROCESS, *settings])
    check_code(checkpoint / CONFIG_FILE, config, named=overrides_tree(overrides, SftConfig), uses={SFT_RUNS_CODE: bool})
    return config


def load_tree(checkpoint: Path, overrides: Sequence[str], root: type[C], model_key: str, settings: Sequence[str]) -> C:
    tree = read_saved(checkpoint / CONFIG_FILE, root)
    whole = checkpoint / "actor" / "model.safetensors"  # with LoRA only the adapter is saved
    if whole.is_file():
        tree = merge_trees(tree, nested({model_key: str(whole.parent.absolute())}))
    tree = merge_trees(tree, overrides_tree(settings, root))
    return validate(merge_trees(tree, overrides_tree(overrides, root)), root=root)


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


def check_code(
    file: Path, config: RunConfig, *, named: Mapping[str, Any], uses: Mapping[str, Callable[[Any], bool]]
) -> None:
    """`named`: the tree of the keys that the user repeated."""
    values, repeated = dict(flattened(config.model_dump(mode="json"))), dict(flattened(named))
    # compare whole values: the file may add entries to a mapping that the user named
    untrusted = [key for key, runs in uses.items() if runs(values[key]) and repeated.get(key) != values[key]]
    if untrusted:
        listed = ", ".join(f"{key}={values[key]}" for key in untrusted)
        allow = " ".join(shlex.quote(f"{key}={override_value(values[key])}") for key in untrusted)
        raise ConfigError(
            f"{file} sets keys that run code or name a server: {listed}. A checkpoint is not trusted to do that. If "
            f"you trust it, add to the command: {allow}"
        )
