"""From a configuration to its plan. Nothing is started, loaded or downloaded."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rloom.algos.needs import ESTIMATOR_GROUP, SMALLEST_WEIGHT, reach
from rloom.config.base import CRITIC
from rloom.config.checks import check_and_warn
from rloom.config.derived import Needs, declared_needs
from rloom.config.engine_checks import megatron_roles, split_faults
from rloom.config.load import with_changes
from rloom.config.schema import Config
from rloom.errors import ConfigError, ModelError
from rloom.gpus import smallest_memory
from rloom.models.context import check_context
from rloom.plan.architecture import UnknownSize, read_fields
from rloom.plan.batches import Batches, batches
from rloom.plan.fit import WayOut, is_counted, needed_offload, ways_out
from rloom.plan.memory import GIB, CachePlan, GpuMemory, Memory, fullest, memory_by_gpu
from rloom.plan.models import FLOAT32, ModelPlan, actor_plan, critic_model, critic_plan, policy_model
from rloom.plan.reward_model import RewardPlan, reward_plan
from rloom.plan.timing import StepTime, step_time
from rloom.plugins import is_own

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
class Machine:
    """The GPUs of a plan."""

    gpus_from: str  # where their number comes from; empty: it is given, or 1
    gpu_bytes: float
    memory_from: str


@dataclass(frozen=True)
class Plan:
    config: Config
    needs: Needs
    batches: Batches
    machine: Machine
    costs: Costs | None  # None: the first note has the reason
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
    machine = Machine(gpus, *gpu_memory(gpu_gib))
    config, offload = as_trained(config, machine.gpu_bytes)
    sizes = batches(config, critic=needs.estimator.needs_critic)
    reward, unknown = counted_reward(config, sizes)
    try:
        costs = estimate(config, needs, sizes, machine.gpu_bytes, reward)
    except UnknownSize as error:
        left_out = f"Memory and time are left out: {error}"
        return Plan(config, needs, sizes, machine, None, (left_out, *advice(config, needs)))
    if config.trainer.device == "cpu":
        reason = "Memory and time are counted for GPUs, and trainer.device=cpu"
        return Plan(config, needs, sizes, machine, None, (reason, *advice(config, needs)))
    return Plan(
        config, needs, sizes, machine, costs, (*offload, *notes(config, costs), *unknown, *advice(config, needs))
    )


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
        path, key, overrides = critic_model(config) if role.path == CRITIC else policy_model(config)
        try:
            fields = {**read_fields(path, key), **overrides}
        except UnknownSize:
            continue
        faults += split_faults(role, fields, f"{key}={path}") if role.workers > 1 else []
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
    costs = Costs(actor, critic, reward, memory_by_gpu(config, sizes, actor, critic, gpu_bytes, reward))
    if not costs.fits:
        return replace(costs, ways_out=tuple(ways_out(config, gpu_bytes)))
    measured = all(model.number_bytes < FLOAT32 for model in (actor, critic) if model is not None)
    time = step_time(config, needs, sizes, actor, critic, costs.generating) if measured else None
    return replace(costs, time=time)


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
