"""From a configuration to its plan. Nothing is started, loaded or downloaded."""

from dataclasses import dataclass

from rloom.config.algorithm_needs import Needs, declared_needs
from rloom.config.checks import verify
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.models.context import check_context
from rloom.plan import models as plan_models
from rloom.plan.architecture import NotKnown
from rloom.plan.batches import Batches, batches
from rloom.plan.memory import GIB, Memory, memory
from rloom.plan.models import FLOAT32, Role
from rloom.plan.timing import StepTime, step_time

USUAL_GPU_GIB = 80.0
SMALLEST_MEASURED = 494e6  # parameters


@dataclass(frozen=True)
class Models:
    """What is known once the models' sizes are."""

    actor: Role
    critic: Role | None
    memory: Memory
    time: StepTime | None  # None: it does not fit, or there is no measured rate


@dataclass(frozen=True)
class Plan:
    config: Config
    needs: Needs
    batches: Batches
    models: Models | None  # None: the reason is the first of the notes
    notes: tuple[str, ...]


def make_plan(config: Config, gpu_gib: float = USUAL_GPU_GIB) -> Plan:
    if not gpu_gib > 0:
        raise ConfigError(f"--gpu_memory={gpu_gib}: a GPU has some; give its GiB")
    needs = declared_needs(config)
    verify(config, needs)
    sizes = batches(config, critic=needs.estimator.needs_critic)
    try:
        models = size_up(config, sizes, gpu_gib)
    except NotKnown as error:
        return Plan(config, needs, sizes, None, (f"Memory and time are left out: {error}",))
    if config.trainer.device == "cpu":
        return Plan(config, needs, sizes, None, ("Memory and time are counted for GPUs, and trainer.device=cpu",))
    return Plan(config, needs, sizes, models, tuple(notes(config, models)))


def size_up(config: Config, sizes: Batches, gpu_gib: float) -> Models:
    actor = plan_models.actor(config, sizes.actor)
    critic = plan_models.critic(config, sizes.critic) if sizes.critic is not None else None
    path, data = config.actor_rollout_ref.model.path, config.data
    longest = data.max_prompt_length + data.max_response_length
    check_context(actor.architecture.context, longest, f"actor_rollout_ref.model.path={path}")
    held = memory(config, sizes, actor, critic, gpu_gib * GIB)
    known = held.fits and all(role.number_bytes < FLOAT32 for role in (actor, critic) if role is not None)
    return Models(actor, critic, held, step_time(config, sizes, actor, critic, held) if known else None)


def notes(config: Config, models: Models) -> list[str]:
    found = []
    if models.time is None:
        why = "rates were measured in bfloat16 only" if models.memory.fits else "it does not fit"
        found.append(f"Time is left out: {why}")
    elif models.actor.parameters < SMALLEST_MEASURED / 2:
        found.append("The smallest model measured has 494 M parameters: one so much smaller takes longer than that")
    if config.trainer.pools.own:
        found.append(
            "Memory and time are those of an actor's worker that also holds the other roles; apart, both are less"
        )
    if config.actor_rollout_ref.rollout.name == "hf":
        found.append("Generation is timed as that of rollout.name=native; hf takes several times as long")
    if not config.actor_rollout_ref.actor.use_torch_compile:
        found.append("Activations and time are those of compiled layers; without torch.compile both are more")
    if ":" in config.algorithm.adv_estimator:
        found.append(f"{config.algorithm.adv_estimator} is not run here: it gets a critic where critic.enable=True")
    return found
