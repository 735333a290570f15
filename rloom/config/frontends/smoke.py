"""RLOOM_SMOKE=1: a run of two steps with a tiny model, tiny data and at most two workers in place of the given ones.

The given keys are checked first, as in every run. `replacements` then returns the keys that change, with their new
values; `load_config` puts them on top of all others. Every other key stays as it is given.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rloom.config.base import ACTOR, CRITIC, EMBEDDED_NAME, MODEL, REF, ROLLOUT, RunConfig
from rloom.config.derived import RewardKinds
from rloom.config.given_keys import leaf_keys, override_value
from rloom.config.keys import value_at
from rloom.config.schema import TORCHRUN, Actor, Config, Critic, SftConfig
from rloom.config.sections import SIZES
from rloom.environments.kinds import ENVIRONMENTS
from rloom.episodes.kinds import episode_kind
from rloom.errors import ConfigError
from rloom.extras import TRACKERS
from rloom.gpus import has_uncounted_gpu, visible_gpus
from rloom.language import translate
from rloom.plugins import referenced
from rloom.rewards.kinds import KINDS, OWN_KEY

MAX_WORKERS, MAX_PROMPTS, MAX_ANSWERS, MAX_UPDATES = 2, 4, 4, 2
PROMPT_TOKENS, ANSWER_TOKENS = 64, 48  # of the embedded data
EPISODE_PROMPT_TOKENS, EPISODE_TOKENS = 4096, 256  # of the user's own: the tiny model has a token for each character
OWN_WORKERS = ("rollout", "reward", "critic", "ref")  # the first that has workers of its own keeps one


@dataclass(frozen=True)
class Sizes:
    workers: int
    own: str | None  # the role that has one of two workers for itself
    placed: dict[str, int]  # roles on one of the actor's workers, and its number
    prompts: int
    answers_per_prompt: int

    def ranks(self, role: str) -> int:
        return 1 if role == self.own or role in self.placed else self.workers - (self.own is not None)


def size_changes(config: Config, workers: int) -> dict[str, Any]:
    pools = config.trainer.pools
    own = next((role for role in OWN_WORKERS if role in pools.own), None) if workers > 1 else None
    chosen = {"rollout": 0, "reward": workers - 1 - (own is not None)}  # two workers, if the actor has two
    placed = {role: chosen[role] for role in pools.placed} if workers > 1 else {}
    prompts = power_of_two(config.data.train_batch_size, MAX_PROMPTS)
    sizes = Sizes(workers, own, placed, prompts, power_of_two(config.actor_rollout_ref.rollout.n, MAX_ANSWERS))
    has_episodes = episode_kind(config) is not None
    prompt_tokens = EPISODE_PROMPT_TOKENS if has_episodes else PROMPT_TOKENS
    answer_tokens = min(config.data.max_response_length, EPISODE_TOKENS if has_episodes else ANSWER_TOKENS)
    buffer = config.reward_model.overlong_buffer
    return {
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt_tokens,
        "data.max_response_length": answer_tokens,
        **({} if config.data.max_length is None else {"data.max_length": prompt_tokens + answer_tokens}),
        f"{ROLLOUT}.n": sizes.answers_per_prompt,
        **({"reward_model.overlong_buffer.len": min(buffer.len, answer_tokens)} if buffer.enable else {}),
        **worker_changes(config, sizes),
        **role_changes(ACTOR, config.actor_rollout_ref.actor, config, sizes, prompt_tokens + answer_tokens),
        **role_changes(CRITIC, config.critic, config, sizes, prompt_tokens + answer_tokens),
        **scoring_changes(config, sizes),
    }


def power_of_two(number: int, limit: int) -> int:
    """The largest one up to both."""
    return 1 << (min(number, limit).bit_length() - 1)


def worker_changes(config: Config, sizes: Sizes) -> dict[str, Any]:
    trainer = config.trainer
    changes: dict[str, Any] = {"trainer.nnodes": 1}
    if sizes.workers != (trainer.n_gpus_per_node or 1):  # null: the embedded model takes one GPU
        changes["trainer.n_gpus_per_node"] = sizes.workers
    changes |= {f"trainer.pools.{role}": 1 if role == sizes.own else None for role in trainer.pools.own}
    changes |= {
        f"trainer.pools.{role}": [sizes.placed[role]] if role in sizes.placed else None for role in trainer.pools.placed
    }
    if trainer.nnodes > 1:
        changes |= {"trainer.node_rank": 0, "trainer.master_addr": None, "trainer.master_port": 6379}
    ray_init = config.ray_kwargs.ray_init
    changes["ray_kwargs.ray_init"] = {name: value for name, value in ray_init.items() if name != "address"}
    for path, section, role in (
        (f"{ACTOR}.fsdp_config", config.actor_rollout_ref.actor.fsdp_config, "actor"),
        (f"{CRITIC}.model.fsdp_config", config.critic.model.fsdp_config, "critic"),
    ):
        if section.fsdp_size != -1:
            changes[f"{path}.fsdp_size"] = min(section.fsdp_size, sizes.ranks(role))
    return changes | megatron_changes(config, sizes)


def megatron_changes(config: Config, sizes: Sizes) -> dict[str, Any]:
    """Two workers divide each layer if the given ones do, else the layers, if the given ones do. The tiny model has no
    experts."""
    changes: dict[str, Any] = {}
    for path, role, name in ((ACTOR, config.actor_rollout_ref.actor, "actor"), (CRITIC, config.critic, "critic")):
        own = (*megatron_sizes(role, sizes.ranks(name)), 1, None)
        changes |= {f"{path}.megatron.{size}": value for size, value in zip(SIZES, own, strict=True)}
    return changes | dict.fromkeys((f"{REF}.megatron.{name}" for name in SIZES), None)


def megatron_sizes(role: Actor | Critic, ranks: int) -> tuple[int, int]:
    given = role.megatron
    if given.tensor_model_parallel_size > 1:
        return ranks, 1
    return 1, min(given.pipeline_model_parallel_size, ranks)


def role_changes(name: str, role: Actor | Critic, config: Config, sizes: Sizes, longest: int) -> dict[str, Any]:
    """Two updates where there were two or more. Micro-batches still divide a mini-batch. `longest`: tokens."""
    mini_batch = role.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    updates = min(config.data.train_batch_size // mini_batch, MAX_UPDATES)
    prompts = sizes.prompts // updates
    ranks = sizes.ranks("actor" if name == ACTOR else "critic")
    sequence = sequence_ranks(name, role, sizes)
    tensor, pipeline = megatron_sizes(role, ranks)
    sharing = tensor * pipeline if role.kind.model_parallel else sequence
    changes: dict[str, Any] = {f"{name}.ulysses_sequence_parallel_size": sequence}
    if role.ppo_mini_batch_size is not None:
        changes[f"{name}.ppo_mini_batch_size"] = prompts
    samples, shares = prompts * sizes.answers_per_prompt, max(1, ranks // sharing)
    if role.ppo_micro_batch_size_per_gpu is not None:
        changes[f"{name}.ppo_micro_batch_size_per_gpu"] = power_of_two(role.ppo_micro_batch_size_per_gpu, samples)
    if role.ppo_micro_batch_size is not None:
        changes[f"{name}.ppo_micro_batch_size"] = max(shares, power_of_two(role.ppo_micro_batch_size, samples))
    least = -(-longest // sequence)
    changes[f"{name}.ppo_max_token_len_per_gpu"] = max(role.ppo_max_token_len_per_gpu, least)
    return changes


def sequence_ranks(name: str, role: Actor | Critic, sizes: Sizes) -> int:
    """Ranks that share a sequence. The reference shares sequences as the actor does."""
    available = sizes.ranks("critic") if name == CRITIC else min(sizes.ranks("actor"), sizes.ranks("ref"))
    return power_of_two(role.ulysses_sequence_parallel_size, available)


def scoring_changes(config: Config, sizes: Sizes) -> dict[str, Any]:
    """The older keys, which count the samples of all workers together, are multiples of the number of workers."""
    changes = {}
    for key, size, role in (
        (f"{ROLLOUT}.log_prob_micro_batch_size", config.actor_rollout_ref.rollout.log_prob_micro_batch_size, "actor"),
        (f"{REF}.log_prob_micro_batch_size", config.actor_rollout_ref.ref.log_prob_micro_batch_size, "ref"),
        ("reward_model.micro_batch_size", config.reward_model.micro_batch_size, "reward"),
    ):
        if size is not None:
            ranks = sizes.ranks(role)
            changes[key] = max(ranks, power_of_two(size, sizes.prompts * sizes.answers_per_prompt))
    return changes


WEIGHTS = "reward_model.composite.weights"
SERVERS = {name: kind for name, kind in KINDS.items() if kind.server is not None}  # kinds of rewards that call one


def reward_changes(config: Config, environment: Mapping[str, str]) -> dict[str, Any]:
    """Functions of the user stay. A judge stays where an address for it is given, since that may be a local server."""
    changes: dict[str, Any] = {}
    for kind in RewardKinds.of(config).chosen.values():
        if kind.smoke_changes is not None:
            changes |= referenced(kind.smoke_changes)(config)
    absent = absent_servers(config, environment)
    for name in absent:
        changes |= given_keys(config, str(RewardKinds.of(config).every[name].section))
    if not {*config.reward_model.kinds}.isdisjoint(absent):
        changes[OWN_KEY] = [name for name in config.reward_model.kinds if name not in absent]
    if absent and config.reward_model.composite.enable:
        changes[WEIGHTS] = remaining_weights(config, absent)
    return changes


def embedded_classifier(config: Config) -> dict[str, Any]:
    """In place of a reward model."""
    reward = config.reward_model
    paths = {"reward_model.path": reward.path, "reward_model.model.path": reward.model.path}
    unread = ("reward_model.label_weights", "reward_model.max_length")
    return {key: EMBEDDED_NAME for key, path in paths.items() if path is not None} | dict.fromkeys(unread)


def own_judge_cache(config: Config) -> dict[str, Any]:
    if config.reward_model.api.cache_dir is None:
        return {}
    return {"reward_model.api.cache_dir": f"{config.trainer.default_local_dir}/smoke/judge_cache"}


def absent_servers(config: Config, environment: Mapping[str, str]) -> list[str]:
    """The kinds of rewards that would call a server."""
    chosen = RewardKinds.of(config).chosen
    return [name for name, kind in chosen.items() if kind.server and kind.server.is_absent(config, environment)]


def server_notes(config: Config) -> dict[str, str]:
    """Key of a server that is not called -> what replaces it."""
    kinds = RewardKinds.of(config).every.values()
    return {kind.switch: kind.server.smoke_note(config) for kind in kinds if kind.server}


def is_key_of_replaced_server(path: str, changes: Mapping[str, Any]) -> bool:
    """A further key of a section whose switch is off: not worth a line."""
    return any(
        path.startswith(f"{kind.section}.") and kind.switch in changes and path != kind.switch
        for kind in SERVERS.values()
    )


def given_keys(config: Config, section: str) -> dict[str, Any]:
    """The keys of the section that are set -> their defaults. Presets and files may set some, too."""
    keys = leaf_keys()
    return {path: keys[path].default for path in sorted(config.given) if path.startswith(f"{section}.")}


def remaining_weights(config: Config, absent: Sequence[str]) -> dict[str, Any]:
    """The parts of the mix that can be computed; the default if none is left."""
    kinds, kept = RewardKinds.of(config), config.model_dump(include={"reward_model"})["reward_model"]["composite"]
    found = {name: weight for name, weight in kept["weights"].items() if kinds.computing(name) not in absent}
    return found or {kinds.every[kinds.default].parts[0]: 1.0}


VARIABLE = "RLOOM_SMOKE"
STEPS, TRAINING_ROWS, VALIDATION_ROWS, VALIDATION_ANSWERS, LORA_RANK = 2, 64, 16, 4, 8
SWITCHES = {  # key that changes -> keys that the run then does not read
    "trainer.total_training_steps": "trainer.total_epochs",
    f"{ROLLOUT}.name": f"{ROLLOUT}.server",
    **{kind.switch: str(kind.section) for kind in SERVERS.values()},
}
OF_ANOTHER_MODEL = (  # keys whose values fit the model that they were given with
    f"{MODEL}.override_config",
    f"{MODEL}.target_modules",
    f"{MODEL}.lora_adapter_path",
    f"{MODEL}.custom_chat_template",
    "data.apply_chat_template_kwargs",
    "critic.model.override_config",
    "reward_model.model.input_tokenizer",
    f"{ACTOR}.megatron.override_transformer_config",
    "critic.megatron.override_transformer_config",
)
OF_OTHER_DATA = ("data.prompt_key", "data.reward_fn_key", "data.label_key")


@dataclass(frozen=True)
class Available:
    """What decides about the engine, the number of workers and the judge."""

    gpus: int
    installed: Callable[[str], bool]  # a package
    environment: Mapping[str, str]
    uncounted_gpu: bool = False  # the machine may have GPUs beside `gpus`


def is_on(environment: Mapping[str, str]) -> bool:
    value = environment.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE}={value}: use 1 for a run of two steps with a tiny model and data, or unset it")
    return value == "1"


def examine(environment: Mapping[str, str]) -> Available:
    return Available(len(visible_gpus(environment)), is_found, environment, has_uncounted_gpu())


def is_found(package: str) -> bool:
    return find_spec(package) is not None


def replacements(config: Config, available: Available) -> dict[str, Any]:
    """The keys whose value changes -> the new value. `config` is checked."""
    keys = leaf_keys()
    others = OF_ANOTHER_MODEL if episode_kind(config) is not None else (*OF_ANOTHER_MODEL, *OF_OTHER_DATA)
    changes = {
        **{path: keys[path].default for path in others},
        **model_changes(config),
        **data_changes(config),
        **engine_changes(config, available),
        **run_changes(config),
        **device_changes(config, available, smoke_workers(config, available)),
        **reward_changes(config, available.environment),
        **size_changes(config, smoke_workers(config, available)),
    }
    return {path: value for path, value in changes.items() if value_at(config, path) != value}


def usable_gpus(config: RunConfig, available: Available) -> int:
    return 0 if config.trainer.device == "cpu" else available.gpus


def smoke_workers(config: RunConfig, available: Available) -> int:
    return min(config.workers, usable_gpus(config, available) or MAX_WORKERS, MAX_WORKERS)


def device_changes(config: RunConfig, available: Available, workers: int) -> dict[str, Any]:
    """Several workers without a GPU are an error, unless they are on the CPU."""
    on_cpu = workers > 1 and config.trainer.device == "auto" and not available.gpus and not available.uncounted_gpu
    return {"trainer.device": "cpu"} if on_cpu else {}


def model_changes(config: Config) -> dict[str, Any]:
    model = config.actor_rollout_ref.model
    changes: dict[str, Any] = {f"{MODEL}.path": EMBEDDED_NAME}
    if config.critic.model.path is not None:
        changes["critic.model.path"] = EMBEDDED_NAME
    if model.lora_adapter_path is not None:
        changes[f"{MODEL}.lora_rank"] = model.lora_rank or LORA_RANK
    if episode_kind(config) is not None:  # the prompts are the user's own
        longer = {"max_position_embeddings": EPISODE_PROMPT_TOKENS + EPISODE_TOKENS}
        changes |= {f"{MODEL}.override_config": longer, "critic.model.override_config": longer}
    if config.replays_routing:  # the tiny model has no experts
        changes |= {f"{ACTOR}.router_replay.mode": "disabled"}
        changes |= {f"{ROLLOUT}.enable_rollout_routing_replay": False}
    return changes


def data_changes(config: Config) -> dict[str, Any]:
    """An environment reads the columns of its rows: they stay, and no prompt is too long for the tiny model. An
    environment of rloom has embedded rows."""
    rows: dict[str, Any] = {"data.train_max_samples": TRAINING_ROWS, "data.val_max_samples": VALIDATION_ROWS}
    if episode_kind(config) is not None:
        rows |= {"data.truncation": "left", "data.filter_overlong_prompts": False}
        if config.actor_rollout_ref.rollout.multi_turn.environment not in ENVIRONMENTS:
            return rows
    changes: dict[str, Any] = {"data.train_files": EMBEDDED_NAME, **rows}
    if config.data.val_files is not None:
        changes["data.val_files"] = EMBEDDED_NAME
    if not config.has_held_out_prompts:  # the embedded data have, and they would be used
        changes |= {"trainer.val_before_train": False, "trainer.test_freq": -1}
    if config.custom_reward_function.path is None:  # else the user's function reads them
        changes["custom_reward_function.reward_kwargs"] = {}
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
    if not all(map(available.installed, rollout.kind.packages)):
        return f"{rollout.name} is not installed"
    needs_gpu = rollout.kind.needs_gpu and not usable_gpus(config, available)
    return f"{rollout.name} needs a GPU" if needs_gpu else None


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
        "trainer.replay": None,
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
    notes = {**server_notes(config), **worker_notes(config, smoke_workers(config, available))}
    return replaced_text(config, worth_a_line, {**notes, f"{ROLLOUT}.name": engine_note(config, available)})


def worker_notes(config: RunConfig, workers: int) -> dict[str, str]:
    """Why there is one process where two workers are usual."""
    if workers == min(config.workers, MAX_WORKERS):
        return {}
    return {"trainer.n_gpus_per_node": "one GPU is visible: one process holds the whole model"}


def replaced_text(config: RunConfig, changes: Mapping[str, Any], notes: Mapping[str, str | None]) -> str:
    lines = [
        f"  {path}: {shown(value_at(config, path))} -> {shown(value)}{f' ({translate(note)})' if note else ''}"
        for path, value in changes.items()
        for note in [notes.get(path)]
    ]
    return "\n".join([translate(f"{VARIABLE}=1: two steps with a tiny model and data"), *lines])


def shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


ROWS = 8  # of a step


def torchrun_settings(config: SftConfig) -> list[str]:
    """Under torchrun, machines and workers are those that it started."""
    if not config.uses_torchrun:
        return []
    local = int(os.environ[TORCHRUN])
    started = {"trainer.n_gpus_per_node": local, "trainer.nnodes": int(os.environ["WORLD_SIZE"]) // local}
    for key, number in started.items():
        if config.is_given(key) and value_at(config, key) != number:
            raise ConfigError(
                f"{key}={value_at(config, key)}: torchrun has started {number}; remove the key, or start `rloom sft` "
                "without torchrun"
            )
    return [f"++{key}={number}" for key, number in started.items()]


def smoke_settings(config: SftConfig) -> list[str]:
    """With RLOOM_SMOKE=1: the embedded model on a few embedded rows, two steps, at most two workers."""
    if not is_on(os.environ):
        return []
    available = examine(os.environ)
    workers = min(config.workers, MAX_WORKERS) if config.uses_torchrun else smoke_workers(config, available)
    wanted = sft_replacements(config, workers) | device_changes(config, available, workers)
    changes = {key: value for key, value in wanted.items() if value_at(config, key) != value}
    print(replaced_text(config, changes, worker_notes(config, workers)), flush=True)
    return [f"++{key}={override_value(value)}" for key, value in changes.items()]


def sft_replacements(config: SftConfig, workers: int) -> dict[str, Any]:
    trainer, rows = config.trainer, min(config.data.train_batch_size, ROWS)
    sizes = {} if config.uses_torchrun else {"nnodes": 1}
    if not config.uses_torchrun and workers != (trainer.n_gpus_per_node or 1):  # null: the embedded model takes one GPU
        sizes["n_gpus_per_node"] = workers
    return {
        "model.path": EMBEDDED_NAME,
        "model.custom_chat_template": None,
        "data.apply_chat_template_kwargs": {},
        "data.train_files": EMBEDDED_NAME,
        "data.val_files": EMBEDDED_NAME,
        "data.prompt_key": "prompt",
        "data.prompt_dict_keys": None,
        "data.response_key": "extra_info",
        "data.response_dict_keys": ["answer"],
        "data.multiturn.enable": False,
        "data.train_batch_size": rows,
        "data.train_max_samples": STEPS * rows,
        "data.val_max_samples": rows,
        "data.max_length": min(config.data.max_length, 256),
        "data.micro_batch_size": None,
        "data.micro_batch_size_per_gpu": min(config.data.micro_batch_size_per_gpu or rows, rows),
        "engine.fsdp_size": -1,
        "engine.ulysses_sequence_parallel_size": min(config.engine.ulysses_sequence_parallel_size, workers),
        "trainer.total_training_steps": STEPS,
        "trainer.logger": ["console"],
        **{f"trainer.{key}": value for key, value in sizes.items()},
        "trainer.default_local_dir": f"{trainer.default_local_dir}/smoke",
        "trainer.resume_mode": "disable",
    }
