"""The GPUs of OpenRLHF's roles as machines and pools of rloom, and its generation beside training."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rloom.config.base import ROLLOUT
from rloom.config.frontends.openrlhf_flags import GivenFlags

GPUS_OF_A_MACHINE = 8  # OpenRLHF's default for every role
ROLES = ("actor", "ref", "critic", "reward")
FLAGS = (
    *(f"{role}_num_{what}" for role in ROLES for what in ("nodes", "gpus_per_node")),
    *("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models", "vllm_num_engines"),
    "vllm_tensor_parallel_size",
)


def gpus_of(given: GivenFlags, role: str) -> int:
    return int(given[f"{role}_num_nodes"] * given[f"{role}_num_gpus_per_node"])


def pools(given: GivenFlags, roles: Collection[str]) -> dict[str, int]:
    """Roles with GPUs of their own -> how many. `roles`: those of this run beside the actor."""
    if given["colocate_all_models"] and not given["async_train"]:
        return {}
    shared = {*roles} if given["colocate_all_models"] else {"ref"} if given["colocate_actor_ref"] else set()
    shared |= {"reward"} if shares_critic(given, roles) else set()
    own = {role: gpus_of(given, role) for role in roles if role not in shared}
    engines = given["vllm_num_engines"] or 0
    return own | ({"rollout": engines * given["vllm_tensor_parallel_size"]} if engines else {})


def shares_critic(given: GivenFlags, roles: Collection[str]) -> bool:
    """Without the actor they cannot: the reward model goes to the actor's GPUs."""
    return bool(given["colocate_critic_reward"] and {"critic", "reward"} <= {*roles})


def placement_values(given: GivenFlags, roles: Collection[str], overrides: Collection[str]) -> dict[str, Any]:
    """Without a placement flag: one worker with all roles, rloom's default. `overrides`: keys of the command line."""
    values: dict[str, Any] = {}
    if "vllm_gpu_memory_utilization" in given or given["vllm_num_engines"]:
        values[f"{ROLLOUT}.gpu_memory_utilization"] = given["vllm_gpu_memory_utilization"]
    if not any(name in given for name in FLAGS):
        return values
    own = pools(given, roles)
    values |= {f"trainer.pools.{role}": size for role, size in own.items()}
    if given["vllm_num_engines"]:
        values[f"{ROLLOUT}.name"] = "vllm"
    if "vllm_tensor_parallel_size" in given or given["vllm_num_engines"]:
        values[f"{ROLLOUT}.tensor_model_parallel_size"] = given["vllm_tensor_parallel_size"]
    nodes, per_node = machines(given, gpus_of(given, "actor") + sum(own.values()))
    values |= {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": per_node}
    if nodes > 1 and not {"trainer.master_addr", "ray_kwargs.ray_init.address"} & set(overrides):
        values["ray_kwargs.ray_init.address"] = "auto"  # as OpenRLHF, which joins the running Ray cluster
    return values


def machines(given: GivenFlags, gpus: int) -> tuple[int, int]:
    """(machines, GPUs of each). OpenRLHF's flags have no number of machines; a role on several has their size."""
    on_several = [given[f"{role}_num_gpus_per_node"] for role in ROLES if given[f"{role}_num_nodes"] > 1]
    per_node = on_several[0] if on_several else GPUS_OF_A_MACHINE
    return (1, gpus) if gpus <= per_node and not on_several else (gpus // per_node, per_node)


def placement_faults(given: GivenFlags, roles: Collection[str], typed: Mapping[str, str]) -> Iterator[str]:
    actor, engines = gpus_of(given, "actor"), given["vllm_num_engines"] or 0
    tensor_parallel = given["vllm_tensor_parallel_size"]
    below = [name for name in FLAGS if isinstance(given[name], int) and name in given and given[name] < 1]
    for name in below:
        if name != "vllm_num_engines" or engines < 0:
            yield f"--{name} {given[name]}: use 1 or more"
    if below:
        return
    if given["colocate_all_models"] and not given["async_train"] and engines and engines * tensor_parallel != actor:
        yield (
            f"--colocate_all_models: --vllm_num_engines {engines} × --vllm_tensor_parallel_size {tensor_parallel} = "
            f"{engines * tensor_parallel} GPUs, and the actor has --actor_num_nodes × --actor_num_gpus_per_node = "
            f"{actor}; make them equal"
        )
    sizes = {"actor": actor, **pools(given, roles)}
    gpus = sum(sizes.values())
    nodes, per_node = machines(given, gpus)
    chosen = {"trainer.nnodes", "trainer.n_gpus_per_node"} <= set(typed)
    if nodes * per_node != gpus and not chosen and any(name in given for name in FLAGS):
        yield (
            f"{' + '.join(f'{role} {size}' for role, size in sizes.items())} = {gpus} GPUs do not fill machines of "
            f"{per_node}; change the flags of the placement, or set the machines after them: trainer.nnodes=N "
            "trainer.n_gpus_per_node=M"
        )


def async_values(given: GivenFlags) -> dict[str, Any]:
    """OpenRLHF's queue has the batch of the next step, too. It drops no batch."""
    if not given["async_train"]:
        return {}
    return {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.num_warmup_batches": given["async_queue_size"] - 1,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    }


def async_faults(given: GivenFlags, typed: Mapping[str, str]) -> Iterator[str]:
    if not given["async_train"]:
        if given["partial_rollout"]:
            yield "--partial_rollout: answers go on with new weights while a step trains; add --async_train"
        return
    if given["async_queue_size"] < 1:
        yield f"--async_queue_size {given['async_queue_size']}: use 1 or more"
    if not given["vllm_num_engines"] and "trainer.pools.rollout" not in typed:
        yield "--async_train needs GPUs that generate while the others train; add --vllm_num_engines N"
