"""From a configuration to its plan. Nothing is started, loaded or downloaded.

Where a run does not fit on its GPUs, the plan names keys that make it fit, each of them planned. `rloom train` checks
the memory in the same way.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloom.algos.needs import ESTIMATOR_GROUP, SMALLEST_WEIGHT, reach
from rloom.config.base import CRITIC, EMBEDDED_NAME
from rloom.config.checks import check, check_and_warn
from rloom.config.derived import Needs, declared_needs
from rloom.config.engine_checks import megatron_roles, split_faults
from rloom.config.keys import value_at
from rloom.config.load import expand, replaced, with_changes
from rloom.config.schema import Actor, Config, Critic
from rloom.errors import ConfigError, ModelError
from rloom.gpus import smallest_memory
from rloom.models.limits import check_context
from rloom.models.source import UnknownSize, read_config
from rloom.plan.architecture import FLOAT32, ModelPlan, actor_plan, critic_model, critic_plan, policy_model
from rloom.plan.batches import Batches, batches
from rloom.plan.disk import DiskPlan, disk_plan
from rloom.plan.memory import (
    GIB,
    CachePlan,
    GpuMemory,
    Memory,
    RewardPlan,
    fullest,
    host_at_start,
    memory_by_gpu,
    reward_plan,
)
from rloom.plan.modes import ModeTime, mode_times
from rloom.plan.timing import StepTime, step_time
from rloom.plugins import is_own

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
    trains = trainer.device != "cpu" and not trainer.val_only and config.model_path != EMBEDDED_NAME
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
    sections = {f"actor_rollout_ref.actor.{actor.kind.section}": actor.engine_memory}
    if has_critic(config):
        of_critic = {"fsdp_config": "critic.model.fsdp_config", "megatron": "critic.megatron"}[critic.kind.section]
        sections = {of_critic: critic.engine_memory, **sections}
    of_reference = f"actor_rollout_ref.ref.{actor.kind.section}.param_offload"
    between = [of_reference] if config.has_reference_model and not value_at(config, of_reference) else []
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
    longest = config.data.longest_sample
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
    while rollout.kind.tensor_parallel and size <= min(config.actor_workers, LARGEST_MACHINE):
        yield {f"{ROLLOUT}.tensor_model_parallel_size": size}
        size *= 2


def more_gpus(config: Config) -> Iterator[Changes]:
    if config.trainer.nnodes == 1:
        yield from ({"trainer.n_gpus_per_node": gpus} for gpus in (2, 4, LARGEST_MACHINE) if gpus > config.workers)


def lora(config: Config) -> Iterator[Changes]:
    if not config.actor_rollout_ref.model.has_lora:
        yield {f"{MODEL}.lora_rank": LORA_RANK}


USUAL_GPUS, USUAL_GPU_GIB = 8, 80.0  # the number is verl's default
ASSUMED = f"{USUAL_GPUS} GPUs are assumed"
SMALLEST_MEASURED = 494e6  # parameters


@dataclass(frozen=True)
class Costs:
    """What needs the models' sizes."""

    actor: ModelPlan
    critic: ModelPlan | None
    reward: RewardPlan | None  # None: there is none, or a note has the reason
    gpus: Sequence[GpuMemory]  # one for each set of roles that a GPU of the actor holds
    time: StepTime | None = None  # None: it does not fit, or no rate was measured
    modes: Sequence[ModeTime] = ()  # iff there is a time
    host_bytes: float = 0  # of the first machine while it reads a model
    ways_out: tuple[WayOut, ...] = ()  # settings with which it fits, if it does not

    @property
    def fullest(self) -> GpuMemory:
        return fullest(self.gpus)

    @property
    def memory(self) -> Memory:
        return self.fullest.memory

    @property
    def generating(self) -> Memory:
        return next(gpu.memory for gpu in self.gpus if gpu.generates)

    @property
    def cache(self) -> CachePlan:
        found = self.generating.cache
        assert found is not None  # it generates
        return found

    @property
    def fits(self) -> bool:
        return all(gpu.memory.fits for gpu in self.gpus)


@dataclass(frozen=True)
class PlannedGpus:
    """The GPUs of a plan."""

    gpus_from: str  # where their number comes from; empty: it is given, or 1
    gpu_bytes: float
    memory_from: str


@dataclass(frozen=True)
class Plan:
    config: Config
    needs: Needs
    batches: Batches
    machine: PlannedGpus
    costs: Costs | None  # None: the first note has the reason
    disk: DiskPlan | None  # None: the size of the models is not known
    notes: tuple[str, ...]


def make_plan(given: Config, gpu_gib: float | None = None) -> Plan:
    """`gpu_gib`: memory of a GPU. None: that of this machine's, or 80."""
    if gpu_gib is not None and not gpu_gib > 0:
        raise ConfigError(f"--gpu_memory={gpu_gib}: give the GiB of one GPU, a number above 0")
    config, gpus = with_gpus(given)
    needs = declared_needs(config)
    try:
        check_and_warn(config, needs)
        check_splits(config, critic=needs.estimator.needs_critic)
    except ConfigError as error:
        raise ConfigError(f"{error}\n{gpus}" if gpus.startswith(ASSUMED) else str(error)) from None
    machine = PlannedGpus(gpus, *gpu_memory(gpu_gib))
    config, offload = as_trained(config, machine.gpu_bytes)
    sizes = batches(config, critic=needs.estimator.needs_critic)
    reward, unknown = counted_reward(config, sizes)
    try:
        costs = estimate(config, needs, sizes, machine.gpu_bytes, reward)
    except UnknownSize as error:
        left_out = f"Memory and time are left out: {error}"
        return Plan(config, needs, sizes, machine, None, None, (left_out, *advice(config, needs)))
    folder = expand(config.trainer.default_local_dir).absolute()
    disk = disk_plan(config, folder, config.trainer.total_training_steps, critic=needs.estimator.needs_critic)
    if config.trainer.device == "cpu":
        reason = "Memory and time are counted for GPUs, and trainer.device=cpu"
        return Plan(config, needs, sizes, machine, None, disk, (reason, *advice(config, needs)))
    found = (*offload, *notes(config, costs), *unknown, *advice(config, needs))
    return Plan(config, needs, sizes, machine, costs, disk, found)


def as_trained(config: Config, gpu_bytes: float) -> tuple[Config, list[str]]:
    """With the offload that `rloom train` switches on, and why it does."""
    try:
        checked = config.trainer.memory_check and is_counted(config)
        offload = needed_offload(config, gpu_bytes) if checked else None
    except ModelError:
        offload = None  # the size of the model is unknown
    if offload is None:
        return config, []
    return offload.config, [f"`rloom train` offloads by itself: {offload.reason}"]


def with_gpus(config: Config) -> tuple[Config, str]:
    """The configuration with a number of GPUs, and where the number comes from; empty: it is given, or 1."""
    if not config.lacks_gpus:
        return config, config.all_visible
    source = f"{ASSUMED}: none is visible here, and trainer.n_gpus_per_node is not given"
    return with_changes(config, {"trainer.n_gpus_per_node": USUAL_GPUS}), source


def gpu_memory(given_gib: float | None) -> tuple[float, str]:
    """(bytes, where they come from)"""
    if given_gib is not None:
        return given_gib * GIB, ""
    found = smallest_memory(os.environ)
    if found is not None:
        return found, "this machine's"
    return USUAL_GPU_GIB * GIB, "assumed; --gpu_memory says otherwise"


def check_splits(config: Config, *, critic: bool) -> None:
    """By config.json, where it is present."""
    faults: list[str] = []
    for role in megatron_roles(config, critic=critic):
        source = critic_model(config) if role.path == CRITIC else policy_model(config)
        try:
            fields = read_config(source, download=False)
        except UnknownSize:
            continue
        faults += split_faults(role, fields, f"{source.key}={source.path}") if role.workers > 1 else []
    if faults:
        raise ConfigError("\n".join(faults))


def counted_reward(config: Config, sizes: Batches) -> tuple[RewardPlan | None, list[str]]:
    """The reward model's plan, or a note that its size is unknown."""
    try:
        return reward_plan(config, sizes), []
    except UnknownSize as error:
        return None, [f"The reward model's memory is left out: {error}"]


def estimate(config: Config, needs: Needs, sizes: Batches, gpu_bytes: float, reward: RewardPlan | None) -> Costs:
    actor, critic = actor_plan(config, sizes), critic_plan(config, sizes)
    path = config.actor_rollout_ref.model.path
    check_context(actor.architecture.context, sizes.longest, f"actor_rollout_ref.model.path={path}")
    gpus = memory_by_gpu(config, sizes, actor, critic, gpu_bytes, reward)
    costs = Costs(actor, critic, reward, gpus, host_bytes=host_at_start(config, actor, critic, reward))
    if not costs.fits:
        return replace(costs, ways_out=tuple(ways_out(config, gpu_bytes)))
    measured = all(model.number_bytes < FLOAT32 for model in (actor, critic) if model is not None)
    time = step_time(config, needs, sizes, actor, critic, costs.generating) if measured else None
    return replace(costs, time=time, modes=mode_times(config, gpu_bytes) if time is not None else ())


def advice(config: Config, needs: Needs) -> list[str]:
    """On keys that make learning slow."""
    algorithm, longest = config.algorithm, config.data.max_response_length
    factor = needs.estimator.discount(algorithm.gamma, algorithm.lam)
    if factor >= 1 or factor**longest >= SMALLEST_WEIGHT:
        return []
    values = {"algorithm.gamma": algorithm.gamma, "algorithm.lam": algorithm.lam}
    used = [key for key, value in values.items() if value < 1 and key.split(".")[1] in needs.estimator.reads]
    given = " ".join(f"{key}={values[key]:g}" for key in used)
    whole = " ".join(f"{key}=1.0" for key in used)
    return [
        f"{given}: the reward reaches about the last {reach(factor)} tokens of an answer (5 % of it at the first of "
        f"them), and answers may have {longest:,}; if they are longer than that, use {whole}"
    ]


def notes(config: Config, costs: Costs) -> list[str]:
    found = []
    if costs.time is None:
        why = "rates were measured in bfloat16 only" if costs.fits else "it does not fit"
        found.append(f"Time is left out: {why}")
    elif costs.actor.parameters < SMALLEST_MEASURED / 2:
        found.append("The smallest model measured has 494 M parameters: a step of one this small takes longer")
    if costs.actor.megatron is not None:
        found.append("Activations of the Megatron engine are counted as those of compiled layers; eager ones take more")
    if config.trainer.pools.own:
        found.append("Memory and time are those of a worker that holds all roles; with pools both are lower")
    if config.reward_model.model_path is not None and costs.time is not None:
        found.append("The time of the reward model is not counted")
    rollout = config.actor_rollout_ref.rollout
    if rollout.kind.speed is not None:
        found.append(f"Generation is timed as that of rollout.name=native; {rollout.name} {rollout.kind.speed}")
    if not config.actor_rollout_ref.actor.use_torch_compile:
        found.append("Activations and time are those of compiled layers; without torch.compile both are higher")
    if is_own(config.algorithm.adv_estimator, ESTIMATOR_GROUP):
        found.append(f"{config.algorithm.adv_estimator} is not loaded: a critic is counted if critic.enable=True")
    return found
