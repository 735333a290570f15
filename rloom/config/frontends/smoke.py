"""RLOOM_SMOKE=1: a run of two steps with a tiny model, tiny data and at most two workers in place of the given ones.

The given keys are checked first, as in every run. `replacements` then returns the keys that change, with their new
values; `load_config` puts them on top of all others. Every other key stays as it is given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rloom.config.frontends.smoke_rewards import is_key_of_replaced_server, reward_changes, server_notes
from rloom.config.frontends.smoke_sizes import MAX_WORKERS, size_changes
from rloom.config.keys import value_at
from rloom.config.run_config import RunConfig
from rloom.config.schema import EMBEDDED, Config
from rloom.config.sources import leaf_keys
from rloom.errors import ConfigError
from rloom.extras import TRACKERS
from rloom.gpus import visible_gpus

VARIABLE = "RLOOM_SMOKE"
STEPS, TRAINING_ROWS, VALIDATION_ROWS, VALIDATION_ANSWERS, LORA_RANK = 2, 64, 16, 4, 8
MODEL, ROLLOUT, TRAINER = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "trainer"
SWITCHES = {  # key that changes -> keys that the run then does not read
    "trainer.total_training_steps": "trainer.total_epochs",
    f"{ROLLOUT}.name": f"{ROLLOUT}.server",
    "reward_model.api.enable": "reward_model.api",
    "reward_model.remote.urls": "reward_model.remote",
}
OF_ANOTHER_MODEL = (  # keys whose values fit the model or the data files that they were given with
    f"{MODEL}.override_config",
    f"{MODEL}.target_modules",
    f"{MODEL}.lora_adapter_path",
    f"{MODEL}.custom_chat_template",
    "critic.model.override_config",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "critic.megatron.override_transformer_config",
    "data.prompt_key",
    "data.reward_fn_key",
)


@dataclass(frozen=True)
class Available:
    """What decides about the engine, the number of workers and the judge."""

    gpus: int
    vllm: bool
    environment: Mapping[str, str]


def is_on(environment: Mapping[str, str]) -> bool:
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}={value}: use 1 for a run of two steps with a tiny model and data, or unset it")
    return value == "1"


def examine(environment: Mapping[str, str]) -> Available:
    return Available(len(visible_gpus(environment)), find_spec("vllm") is not None, environment)


def replacements(config: Config, available: Available) -> dict[str, Any]:
    """The keys whose value changes -> the new value. `config` is checked."""
    changes = {
        **dict.fromkeys(OF_ANOTHER_MODEL, None),
        **model_changes(config),
        **data_changes(config),
        **engine_changes(config, available),
        **run_changes(config),
        **reward_changes(config, available.environment),
        **size_changes(config, smoke_workers(config, available)),
    }
    keys = leaf_keys()
    wanted = {path: keys[path].default if path in OF_ANOTHER_MODEL else value for path, value in changes.items()}
    return {path: value for path, value in wanted.items() if value_at(config, path) != value}


def usable_gpus(config: RunConfig, available: Available) -> int:
    return 0 if config.trainer.device == "cpu" else available.gpus


def smoke_workers(config: RunConfig, available: Available) -> int:
    return min(config.workers, usable_gpus(config, available) or MAX_WORKERS, MAX_WORKERS)


def model_changes(config: Config) -> dict[str, Any]:
    model = config.actor_rollout_ref.model
    changes: dict[str, Any] = {f"{MODEL}.path": EMBEDDED}
    if config.critic.model.path is not None:
        changes["critic.model.path"] = EMBEDDED
    if model.lora_adapter_path is not None:
        changes[f"{MODEL}.lora_rank"] = model.lora_rank or LORA_RANK
    if config.replays_routing:  # the tiny model has no experts
        changes |= {"actor_rollout_ref.actor.router_replay.mode": "disabled"}
        changes |= {f"{ROLLOUT}.enable_rollout_routing_replay": False}
    return changes


def data_changes(config: Config) -> dict[str, Any]:
    rows = {"data.train_max_samples": TRAINING_ROWS, "data.val_max_samples": VALIDATION_ROWS}
    changes: dict[str, Any] = {"data.train_files": EMBEDDED, **rows}
    if config.data.val_files is not None:
        changes["data.val_files"] = EMBEDDED
    if not config.has_held_out_prompts:  # the embedded data have, and they would be used
        changes |= {"trainer.val_before_train": False, "trainer.test_freq": -1}
    return changes


def engine_changes(config: Config, available: Available) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    changes: dict[str, Any] = {f"{ROLLOUT}.tensor_model_parallel_size": 1}
    changes[f"{ROLLOUT}.val_kwargs.n"] = min(rollout.val_kwargs.n, VALIDATION_ANSWERS)
    if engine_note(config, available) is None:
        return changes
    return changes | {f"{ROLLOUT}.name": "native", f"{ROLLOUT}.engine_kwargs": {}} | defaults(f"{ROLLOUT}.server")


def engine_note(config: Config, available: Available) -> str | None:
    """Why the native engine replaces the given one. None: the given one is used."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.uses_servers:
        return "a smoke run uses no servers"
    if rollout.name == "vllm" and not available.vllm:
        return "vllm is not installed"
    return "vllm needs a GPU" if rollout.name == "vllm" and not usable_gpus(config, available) else None


def run_changes(config: Config) -> dict[str, Any]:
    """A directory of its own: a run in the given one is neither continued nor changed."""
    trainer = config.trainer
    folder = f"{trainer.default_local_dir}/smoke"
    changes: dict[str, Any] = {
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": min(trainer.save_freq, STEPS),
        "trainer.critic_warmup": min(trainer.critic_warmup, STEPS - 1),
        "trainer.default_local_dir": folder,
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "trainer.logger": [name for name in trainer.loggers if name not in TRACKERS] or ["console"],
    }
    if config.has_held_out_prompts:
        changes["trainer.test_freq"] = min(trainer.test_freq, STEPS)
    if trainer.loggers == changes["trainer.logger"]:
        del changes["trainer.logger"]
    for name, given in (("rollout", trainer.rollout_data_dir), ("validation", trainer.validation_data_dir)):
        if given is not None:
            changes[f"trainer.{name}_data_dir"] = f"{folder}/{name}_data"
    return changes


def still_given(config: Config, changes: Mapping[str, Any]) -> frozenset[str]:
    """The keys that count as given by the user: those without effect would be reported."""
    unread = [f"{section}." for switch, section in SWITCHES.items() if switch in changes]
    return frozenset(key for key in config.given - changes.keys() if not f"{key}.".startswith(tuple(unread)))


def defaults(section: str) -> dict[str, Any]:
    return {path: key.default for path, key in leaf_keys().items() if path.startswith(f"{section}.")}


def description(config: Config, changes: Mapping[str, Any], available: Available) -> str:
    worth_a_line = {path: value for path, value in changes.items() if not is_key_of_replaced_server(path, changes)}
    notes = {**server_notes(config), **worker_notes(config, available, smoke_workers(config, available))}
    return replaced_text(config, worth_a_line, {**notes, f"{ROLLOUT}.name": f" ({engine_note(config, available)})"})


def worker_notes(config: RunConfig, available: Available, workers: int) -> dict[str, str]:
    """Why there is one process where two workers are usual."""
    if workers == min(config.workers, MAX_WORKERS):
        return {}
    return {"trainer.n_gpus_per_node": " (one GPU is visible: one process holds the whole model)"}


def replaced_text(config: RunConfig, changes: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    lines = [
        f"  {path}: {shown(value_at(config, path))} -> {shown(value)}{notes.get(path, '')}"
        for path, value in changes.items()
    ]
    return "\n".join([f"{VARIABLE}=1: two steps with a tiny model and data", *lines])


def shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
