"""Keys that make a run fit on its GPUs, each of them planned, and the memory check of `rloom train`."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rloom.config.base import EMBEDDED
from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.keys import value_at
from rloom.config.load import replaced, with_changes
from rloom.config.schema import Actor, Config, Critic
from rloom.errors import ConfigError, ModelError
from rloom.plan.batches import batches
from rloom.plan.memory import GIB, Memory, fullest, memory_by_gpu
from rloom.plan.models import actor_plan, critic_plan
from rloom.plan.reward_model import reward_plan

log = logging.getLogger(__name__)
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
SHOWN = 3  # ways out
NOT_ENOUGH = "Neither offload, LoRA, smaller passes nor 8 GPUs alone are enough: combine them, or take a smaller model"
LARGEST_MACHINE = 8  # GPUs
LORA_RANK = 16

Changes = dict[str, Any]  # dotted key -> value


@dataclass(frozen=True)
class WayOut:
    changes: Changes
    memory: Memory

    def __str__(self) -> str:
        keys = " ".join(f"{key}={value}" for key, value in self.changes.items())
        return f"{keys} ({self.memory.peak_bytes / GIB:.1f} GiB)"


def held(config: Config, gpu_bytes: float) -> Memory:
    """The memory of the GPU that holds most."""
    sizes = batches(config, critic=declared_needs(config).estimator.needs_critic)
    models = actor_plan(config, sizes), critic_plan(config, sizes)
    return fullest(memory_by_gpu(config, sizes, *models, gpu_bytes, reward_plan(config, sizes))).memory


def is_counted(config: Config) -> bool:
    """Whether the plan counts what a GPU holds. Not with roles on GPUs of their own, on a cluster whose GPUs may be
    others, and for an engine with arguments that may change the size of its weights."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    trains = trainer.device != "cpu" and not trainer.val_only and config.model_path != EMBEDDED
    return trains and not (trainer.pools.own or config.joins_a_cluster or rollout.engine_kwargs)


def with_offload(config: Config, gpu_bytes: float) -> Config:
    """The configuration to train with: what certainly does not fit is moved to the host, or is an error.

    A run that may fit is started: answers are often shorter than their limit, and then passes need less than planned.
    """
    found = held(config, gpu_bytes)
    if found.fits:
        return config
    size = f"{gpu_bytes / GIB:.1f} GiB"
    ways = list(ways_out(config, gpu_bytes))
    advice = f"It fits with {' or '.join(map(str, ways[:SHOWN]))}." if ways else f"{NOT_ENOUGH}."
    if not found.certainly_too_large:
        log.warning(f"Note: with answers of full length this run takes {found.needs}, of {size} a GPU. {advice}")
        return config
    offload = needed_offload(config, gpu_bytes)
    if offload is None:
        raise ConfigError(
            f"{MODEL}.path={config.model_path}: {certain(found)}. {advice} `rloom plan` with the same keys shows every "
            "part; trainer.memory_check=False starts the run without this check"
        )
    log.warning(f"Note: {offload.reason}")
    return offload.config


@dataclass(frozen=True)
class Offload:
    config: Config
    reason: str


def certain(found: Memory) -> str:
    sizes = f"{found.certain_bytes / GIB:.1f} GiB, of {found.gpu_bytes / GIB:.1f} GiB a GPU"
    return f"the weights of all models, gradients and optimizer state alone take {sizes}"


def needed_offload(config: Config, gpu_bytes: float) -> Offload | None:
    """The offload that `rloom train` switches on. None: it needs none, or none is enough."""
    found = held(config, gpu_bytes)
    if not found.certainly_too_large:
        return None
    moved = [
        (WayOut(changes, held(other, gpu_bytes)), other)
        for changes in offloads(config, lambda key: not config.is_given(key))
        for other in [with_changes(config, changes)]
    ]
    fitting = [one for one in moved if one[0].memory.fits]
    possible = [one for one in moved if not one[0].memory.certainly_too_large]
    if not possible:
        return None
    way, other = fitting[0] if fitting else possible[-1]  # the last moves most
    limit = "" if fitting else ", which is not enough for answers of full length"
    return Offload(other, f"{certain(found)}, so this run has {way}{limit}")


def ways_out(config: Config, gpu_bytes: float) -> Iterator[WayOut]:
    """Settings with which the run fits: one of each kind, the one that changes the run least first."""
    for kind in (smaller_passes(config), offloads(config), tensor_parallel(config), more_gpus(config), lora(config)):
        way = next((way for changes in kind if (way := tried(config, changes, gpu_bytes)) is not None), None)
        if way is not None:
            yield way


def tried(config: Config, changes: Changes, gpu_bytes: float) -> WayOut | None:
    other = replaced(config, changes, config.given)  # a key of the reference that is given may be why there is one
    try:
        check(other, declared_needs(other))
        found = held(other, gpu_bytes)
    except (ConfigError, ModelError):
        return None
    return WayOut(changes, found) if found.fits else None


def offloads(config: Config, may_change: Callable[[str], bool] = lambda key: True) -> Iterator[Changes]:
    """Each alone, then all that stay on the host between updates, then all: weights are needed in every phase."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    reference = config.uses_reference and not config.actor_rollout_ref.model.has_lora
    of_actor = "megatron" if actor.strategy == "megatron" else "fsdp_config"
    sections = {f"actor_rollout_ref.actor.{of_actor}": actor.engine_memory}
    if has_critic(config):
        of_critic = "critic.megatron" if critic.strategy == "megatron" else "critic.model.fsdp_config"
        sections = {of_critic: critic.engine_memory, **sections}
    of_reference = f"actor_rollout_ref.ref.{of_actor}.param_offload"
    between = [of_reference] if reference and not value_at(config, of_reference) else []
    between += [f"{name}.optimizer_offload" for name, section in sections.items() if not section.optimizer_offload]
    weights = [f"{name}.param_offload" for name, section in sections.items() if not section.param_offload]
    between, weights = ([key for key in keys if may_change(key)] for keys in (between, weights))
    yield from ({key: True} for key in between)
    yield from (dict.fromkeys(keys, True) for keys in (between, [*between, *weights]) if keys)


def has_critic(config: Config) -> bool:
    return declared_needs(config).estimator.needs_critic


def smaller_passes(config: Config) -> Iterator[Changes]:
    """Smaller passes of the update: with recomputed layers, with fewer tokens, down to one sample."""
    roles: dict[str, Actor | Critic] = {"actor_rollout_ref.actor": config.actor_rollout_ref.actor}
    if has_critic(config):
        roles["critic"] = config.critic
    models = [MODEL, *(["critic.model"] if "critic" in roles else [])]
    keys = [f"{model}.enable_gradient_checkpointing" for model in models]
    if off := [key for key in keys if not value_at(config, key)]:
        yield dict.fromkeys(off, True)
    longest = config.data.max_prompt_length + config.data.max_response_length
    for divisor in (2, 4, 8, 16):
        changes: Changes = {}
        for name, role in roles.items():
            samples, tokens = role.ppo_micro_batch_size_per_gpu, role.ppo_max_token_len_per_gpu
            if samples is not None and not role.use_dynamic_bsz:
                changes[f"{name}.ppo_micro_batch_size_per_gpu"] = max(1, samples // divisor)
            elif role.ppo_micro_batch_size is None or role.use_dynamic_bsz:
                changes[f"{name}.ppo_max_token_len_per_gpu"] = min(tokens, max(longest, tokens // divisor))
        yield {key: value for key, value in changes.items() if value_at(config, key) != value}


def tensor_parallel(config: Config) -> Iterator[Changes]:
    """More GPUs for one engine, where the engine can divide its weights."""
    rollout = config.actor_rollout_ref.rollout
    size = 2 * rollout.tensor_model_parallel_size
    while rollout.holds_copy and size <= min(config.actor_workers, LARGEST_MACHINE):
        yield {f"{ROLLOUT}.tensor_model_parallel_size": size}
        size *= 2


def more_gpus(config: Config) -> Iterator[Changes]:
    if config.trainer.nnodes == 1:
        yield from ({"trainer.n_gpus_per_node": gpus} for gpus in (2, 4, LARGEST_MACHINE) if gpus > config.workers)


def lora(config: Config) -> Iterator[Changes]:
    if not config.actor_rollout_ref.model.has_lora:
        yield {f"{MODEL}.lora_rank": LORA_RANK}
