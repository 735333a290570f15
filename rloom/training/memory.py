"""Out-of-memory errors of a GPU: keys that reduce the memory of each stage of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rloom.errors import TrainingError, WorkerError

ACTOR, ROLLOUT, REFERENCE, CRITIC = (
    "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "critic"
)  # fmt: skip
GENERATION = (
    f"{ROLLOUT}.gpu_memory_utilization (rollout.name=native or vllm) or {ROLLOUT}.max_num_seqs lower, or "
    f"{ACTOR}.fsdp_config.optimizer_offload=True"
)
PUBLISHING = f"{ROLLOUT}.free_cache_engine=True, {ROLLOUT}.gpu_memory_utilization lower"


def update_keys(role: str, model: str, fsdp: str) -> str:
    return (
        f"{role}.ppo_max_token_len_per_gpu lower (or, where you set it, {role}.ppo_micro_batch_size_per_gpu), "
        f"{model}.enable_gradient_checkpointing=True, {fsdp}.optimizer_offload=True, {fsdp}.param_offload=True"
    )


def scoring_keys(role: str, prefix: str = "log_prob") -> str:
    """Optimizer offload helps: the optimizer state is not in use while a model scores."""
    tokens, samples = f"{role}.{prefix}_max_token_len_per_gpu", f"{role}.{prefix}_micro_batch_size_per_gpu"
    return f"{tokens} lower (or, where you set it, {samples}), {ACTOR}.fsdp_config.optimizer_offload=True"


REWARD = (
    "reward_model.forward_max_token_len_per_gpu lower (or, where you set it, reward_model.micro_batch_size_per_gpu), "
    f"reward_model.model.fsdp_config.param_offload=True, {ACTOR}.fsdp_config.optimizer_offload=True, or workers of its "
    "own (trainer.pools.reward)"
)
BUILDING = (
    f"{ACTOR}.fsdp_config.optimizer_offload=True, {ACTOR}.fsdp_config.param_offload=True, "
    f"{REFERENCE}.fsdp_config.param_offload=True (if there is a reference), "
    f"{CRITIC}.model.fsdp_config.optimizer_offload=True, "
    f"{CRITIC}.model.fsdp_config.param_offload=True, reward_model.model.fsdp_config.param_offload=True, more GPUs "
    "(trainer.n_gpus_per_node), or LoRA "
    "(actor_rollout_ref.model.lora_rank)"
)
BUILD = "build"  # the models, before the first step

# stage (BUILD, or NAME of timing_s/NAME in the metrics) -> what it does, and the keys that reduce its memory
STAGE_KEYS: dict[str, tuple[str, str]] = {
    BUILD: ("loading the models", BUILDING),
    "gen": ("generation", GENERATION),
    "reward": ("scoring by the reward model", REWARD),
    "gen_greedy": ("generation", GENERATION),
    "testing": ("generation for validation", GENERATION),
    "probe": ("scoring by the policy", scoring_keys(ROLLOUT)),
    "old_log_prob": ("scoring by the policy", scoring_keys(ROLLOUT)),
    "ref": ("scoring by the reference", scoring_keys(REFERENCE)),
    "values": ("scoring by the critic", scoring_keys(CRITIC, "ppo")),
    "update_critic": ("the critic's update", update_keys(CRITIC, f"{CRITIC}.model", f"{CRITIC}.model.fsdp_config")),
    "update_actor": ("the actor's update", update_keys(ACTOR, "actor_rollout_ref.model", f"{ACTOR}.fsdp_config")),
    "update_weights": ("copying the weights to the rollout engine", PUBLISHING),
}

# the same for supervised fine-tuning, whose keys are others
SFT_BUILD, SFT_UPDATE, SFT_VALIDATION = "build_sft", "update_sft", "validate_sft"
SFT_MODEL = (
    "engine.optimizer_offload=True, engine.param_offload=True, more GPUs (trainer.n_gpus_per_node), or LoRA "
    "(model.lora_rank)"
)
SFT_PASS = "data.max_token_len_per_gpu lower (or, where you set it, data.micro_batch_size_per_gpu)"
SFT_STAGE_KEYS: dict[str, tuple[str, str]] = {
    SFT_BUILD: ("loading the model", SFT_MODEL),
    SFT_UPDATE: ("the update", f"{SFT_PASS}, model.enable_gradient_checkpointing=True, {SFT_MODEL}"),
    SFT_VALIDATION: ("validation", f"{SFT_PASS}, {SFT_MODEL}"),
}


@contextmanager
def explain_out_of_memory(stage: str) -> Iterator[None]:
    """Add the keys that reduce memory to an out-of-memory error, of this process or of a worker."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(" If reserved but unallocated")[0]  # the rest is about torch's allocator
        doing = (STAGE_KEYS | SFT_STAGE_KEYS)[stage][0]
        raise TrainingError(f"the GPU ran out of memory in {doing}: {reason}\n{advice(stage)}") from error
    except WorkerError as error:
        if error.out_of_memory:
            error.add_note(advice(stage))
        raise


def advice(stage: str) -> str:
    doing, keys = (STAGE_KEYS | SFT_STAGE_KEYS)[stage]
    plan = " `rloom plan` with your keys shows the memory of each part." if stage in STAGE_KEYS else ""
    return f"Keys that reduce the memory of {doing}: {keys}.{plan}"
