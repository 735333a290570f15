"""Batch arithmetic: how a step's samples are shared among engines, ranks and passes."""

from dataclasses import dataclass

from rloom.config.schema import Actor, Config, Critic


def up(whole: int, part: int) -> int:
    return -(-whole // part)


@dataclass(frozen=True)
class PassPlan:
    """How one rank takes its samples through a model."""

    samples: int  # of the rank
    count: int  # passes, where every sample is as long as it may be
    samples_each: int  # at most, then
    tokens: int  # most in a pass, whatever the lengths
    budget: int | None  # tokens a pass; None: by samples


def plan_passes(samples: int, size: int | None, dynamic: bool | None, budget: int, longest: int) -> PassPlan:
    """As the engine cuts: so many samples a pass, or as few passes of equal size as the budget allows."""
    if size is not None and not dynamic:
        return PassPlan(samples, up(samples, size), min(size, samples), min(size, samples) * longest, None)
    count = up(samples, max(1, budget // longest))
    return PassPlan(samples, count, up(samples, count), max(longest, min(budget, samples * longest)), budget)


@dataclass(frozen=True)
class Updates:
    """How a model learns from a step's samples."""

    prompts: int  # a mini-batch
    samples: int  # a mini-batch
    passes: PassPlan  # of a mini-batch, on one rank
    per_epoch: int
    epochs: int

    @property
    def count(self) -> int:
        return self.per_epoch * self.epochs


@dataclass(frozen=True)
class Batches:
    prompts: int
    n: int
    ranks: int
    engines: int
    prompt_tokens: int
    answer_tokens: int
    actor: Updates
    critic: Updates | None  # iff the estimator needs one

    @property
    def samples(self) -> int:
        return self.prompts * self.n

    @property
    def prompts_per_engine(self) -> int:
        return up(self.prompts, self.engines)

    @property
    def samples_per_engine(self) -> int:
        return self.prompts_per_engine * self.n

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> int:
        """Of a step, prompts repeated for each answer, every sample as long as it may be."""
        return self.samples * self.longest

    def scoring(self, each: int | None, whole: int | None, dynamic: bool | None, budget: int) -> PassPlan:
        size = per_rank(each, whole, self.ranks)
        return plan_passes(up(self.samples, self.ranks), size, dynamic, budget, self.longest)


def batches(config: Config, *, critic: bool) -> Batches:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompts = config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
    epochs = config.critic.ppo_epochs or actor.ppo_epochs
    ranks = ranks_of(config)
    return Batches(
        prompts=config.data.train_batch_size,
        n=rollout.n,
        ranks=ranks,
        engines=(config.trainer.pools.rollout or ranks) // rollout.tensor_model_parallel_size,
        prompt_tokens=config.data.max_prompt_length,
        answer_tokens=config.data.max_response_length,
        actor=updates(config, actor, actor.ppo_mini_batch_size, actor.ppo_epochs),
        critic=updates(config, config.critic, prompts, epochs) if critic else None,
    )


def updates(config: Config, role: Actor | Critic, prompts: int, epochs: int) -> Updates:
    ranks, samples = ranks_of(config), prompts * config.actor_rollout_ref.rollout.n
    longest = config.data.max_prompt_length + config.data.max_response_length
    passes = plan_passes(
        up(samples, ranks),
        per_rank(role.ppo_micro_batch_size_per_gpu, role.ppo_micro_batch_size, ranks),
        role.use_dynamic_bsz,
        role.ppo_max_token_len_per_gpu,
        longest,
    )
    return Updates(prompts, samples, passes, config.data.train_batch_size // prompts, epochs)


def per_rank(each: int | None, whole: int | None, ranks: int) -> int | None:
    """Samples a pass: as given, or the older key's share."""
    return max(1, whole // ranks) if each is None and whole is not None else each


def ranks_of(config: Config) -> int:
    """Those that hold the actor."""
    return config.workers - sum(size for role, size in config.trainer.pools.own.items() if role != "actor")
