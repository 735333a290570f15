"""The sizes of a smoke run: workers, batches, lengths. Each is valid if the given ones are.

Prompts and answers of a step become powers of two, so that two workers always get equal numbers of samples.
"""

from dataclasses import dataclass
from typing import Any

from rloom.config.megatron_section import SIZES
from rloom.config.schema import Actor, Config, Critic

MAX_WORKERS, MAX_PROMPTS, MAX_ANSWERS, MAX_UPDATES = 2, 4, 4, 2
PROMPT_TOKENS, ANSWER_TOKENS = 64, 48  # of the embedded data
ACTOR, CRITIC, ROLLOUT, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
OWN_WORKERS = ("rollout", "reward", "critic", "ref")  # the first that has workers of its own keeps one


@dataclass(frozen=True)
class Sizes:
    workers: int
    own: str | None  # the role that has one of two workers for itself
    placed: dict[str, int]  # roles on one of the actor's workers, and its number
    prompts: int
    answers: int  # to each prompt

    def ranks(self, role: str) -> int:
        return 1 if role == self.own or role in self.placed else self.workers - (self.own is not None)


def size_changes(config: Config, workers: int) -> dict[str, Any]:
    pools = config.trainer.pools
    own = next((role for role in OWN_WORKERS if role in pools.own), None) if workers > 1 else None
    chosen = {"rollout": 0, "reward": workers - 1 - (own is not None)}  # two workers, if the actor has two
    placed = {role: chosen[role] for role in pools.placed} if workers > 1 else {}
    prompts = power_of_two(config.data.train_batch_size, MAX_PROMPTS)
    sizes = Sizes(workers, own, placed, prompts, power_of_two(config.actor_rollout_ref.rollout.n, MAX_ANSWERS))
    answer_tokens = min(config.data.max_response_length, ANSWER_TOKENS)
    buffer = config.reward_model.overlong_buffer
    return {
        "data.train_batch_size": prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": answer_tokens,
        f"{ROLLOUT}.n": sizes.answers,
        **({"reward_model.overlong_buffer.len": min(buffer.len, answer_tokens)} if buffer.enable else {}),
        **worker_changes(config, sizes),
        **role_changes(ACTOR, config.actor_rollout_ref.actor, config, sizes, answer_tokens),
        **role_changes(CRITIC, config.critic, config, sizes, answer_tokens),
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
        tensor, pipeline = megatron_sizes(role, sizes.ranks(name))
        changes |= {
            f"{path}.megatron.tensor_model_parallel_size": tensor,
            f"{path}.megatron.pipeline_model_parallel_size": pipeline,
            f"{path}.megatron.expert_model_parallel_size": 1,
            f"{path}.megatron.expert_tensor_parallel_size": None,
        }
    return changes | dict.fromkeys((f"{REF}.megatron.{name}" for name in SIZES), None)


def megatron_sizes(role: Actor | Critic, ranks: int) -> tuple[int, int]:
    given = role.megatron
    if given.tensor_model_parallel_size > 1:
        return ranks, 1
    return 1, min(given.pipeline_model_parallel_size, ranks)


def role_changes(name: str, role: Actor | Critic, config: Config, sizes: Sizes, answer_tokens: int) -> dict[str, Any]:
    """Two updates where there were two or more. Micro-batches still divide a mini-batch."""
    mini_batch = role.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    updates = min(config.data.train_batch_size // mini_batch, MAX_UPDATES)
    prompts = sizes.prompts // updates
    ranks = sizes.ranks("actor" if name == ACTOR else "critic")
    sequence = sequence_ranks(name, role, sizes)
    tensor, pipeline = megatron_sizes(role, ranks)
    sharing = tensor * pipeline if role.strategy == "megatron" else sequence
    changes: dict[str, Any] = {f"{name}.ulysses_sequence_parallel_size": sequence}
    if role.ppo_mini_batch_size is not None:
        changes[f"{name}.ppo_mini_batch_size"] = prompts
    samples, shares = prompts * sizes.answers, max(1, ranks // sharing)
    if role.ppo_micro_batch_size_per_gpu is not None:
        changes[f"{name}.ppo_micro_batch_size_per_gpu"] = power_of_two(role.ppo_micro_batch_size_per_gpu, samples)
    if role.ppo_micro_batch_size is not None:
        changes[f"{name}.ppo_micro_batch_size"] = max(shares, power_of_two(role.ppo_micro_batch_size, samples))
    least = -(-(PROMPT_TOKENS + answer_tokens) // sequence)
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
            changes[key] = max(ranks, power_of_two(size, sizes.prompts * sizes.answers))
    return changes
