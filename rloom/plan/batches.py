"""Batch arithmetic: how a step's samples are shared among rollout engines, ranks and passes."""

from dataclasses import dataclass

from rloom.config.derived import Needs, model_ranks, needs_old_logprobs
from rloom.config.schema import Actor, Config, Critic
from rloom.packing import MicroBatching, share_sizes
from rloom.runtime.placement import ACTOR, ROLLOUT


@dataclass(frozen=True)
class PassPlan:
    """The passes in which one rank takes its samples through a model, one for each micro-batch."""

    samples: int  # number on the rank
    count: int  # passes, if every sample has full length
    samples_each: int  # most samples of a pass, if every sample has full length
    tokens: int  # most tokens of a pass, whatever the lengths
    budget: int | None  # tokens of a pass; None: passes are cut by samples


def plan_passes(samples: int, batching: MicroBatching, longest: int) -> PassPlan:
    cut = batching.cut([longest] * samples)
    each = max(len(rows) for rows in cut)
    # samples of other lengths can fill a pass up to the budget
    tokens = each * longest if batching.tokens is None else max(longest, min(batching.tokens, samples * longest))
    return PassPlan(samples, len(cut), each, tokens, batching.tokens)


@dataclass(frozen=True)
class Updates:
    """The optimizer steps of one model in a step."""

    prompts: int  # number in a mini-batch
    samples: int  # number in a mini-batch
    passes: PassPlan  # for a mini-batch, on one rank
    per_epoch: int
    epochs: int

    @property
    def count(self) -> int:
        return self.per_epoch * self.epochs


@dataclass(frozen=True)
class Batches:
    prompts: int
    answers_per_prompt: int
    ranks: int  # number of ranks that hold the actor
    shares: int  # parts of a batch: ranks, or groups of ranks that divide a model with Megatron
    engines: int
    tensor_parallel: int  # GPUs of an engine
    prompt_tokens: int  # length of the longest prompt that leaves room for the longest answer
    answer_tokens: int
    actor: Updates
    critic: Updates | None  # iff the estimator needs one

    @property
    def samples(self) -> int:
        return self.prompts * self.answers_per_prompt

    @property
    def prompts_per_engine(self) -> int:
        return largest_share(self.prompts, self.engines)

    @property
    def samples_per_engine(self) -> int:
        return self.prompts_per_engine * self.answers_per_prompt

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a step, if every sample has full length; the prompt counts once for each answer."""
        return self.samples * self.longest

    def scoring_passes(self, batching: MicroBatching) -> PassPlan:
        return plan_passes(largest_share(self.samples, self.shares), batching, self.longest)


def largest_share(rows: int, workers: int) -> int:
    return share_sizes(rows, workers)[0]


def batches(config: Config, *, critic: bool) -> Batches:
    rollout, actor, layout = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, config.layout()
    ranks = layout.pool_of(ACTOR).size
    return Batches(
        prompts=config.data.train_batch_size,
        answers_per_prompt=rollout.n,
        ranks=ranks,
        shares=shares_of(actor, ranks),
        engines=rollout.engines(len(layout.workers_of(ROLLOUT))),
        tensor_parallel=rollout.tensor_model_parallel_size,
        prompt_tokens=config.data.longest_sample - config.data.longest_answer,
        answer_tokens=config.data.longest_answer,
        actor=updates(config, actor, ranks, actor.ppo_mini_batch_size, actor.ppo_epochs),
        critic=updates(config, config.critic, ranks, *config.critic_updates) if critic else None,
    )


def shares_of(role: Actor | Critic, ranks: int) -> int:
    return max(1, ranks // model_ranks(role, ranks))


def updates(config: Config, section: Actor | Critic, ranks: int, prompts: int, epochs: int) -> Updates:
    samples = prompts * config.actor_rollout_ref.rollout.n
    longest = config.data.longest_sample
    batching = section.batching(ranks, model_ranks=model_ranks(section, ranks))
    passes = plan_passes(largest_share(samples, shares_of(section, ranks)), batching, longest)
    return Updates(prompts, samples, passes, config.data.train_batch_size // prompts, epochs)


def scoring_passes(config: Config, needs: Needs, sizes: Batches) -> dict[str, tuple[int, PassPlan]]:
    """The passes of this run that score samples for the policy, by what they compute: (ranks or groups of ranks that
    share the samples, passes of each)."""
    roles, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
    used: dict[str, tuple[int, MicroBatching]] = {}
    for name, section, ranks, is_used in (
        ("old log-probs", roles.rollout, sizes.ranks, needs_old_logprobs(config, needs.loss)),
        ("reference", roles.ref, config.workers_of("ref"), config.scores_reference),
    ):
        if is_used:
            batching = section.batching(ranks, model_ranks=model_ranks(actor, ranks))
            used[name] = shares_of(actor, ranks), batching
    if config.reward_model.model_path is not None:
        ranks = config.workers_of("reward")
        used["reward model"] = ranks, config.reward_model.batching(ranks)
    return {
        name: (shares, plan_passes(largest_share(sizes.samples, shares), batching, sizes.longest))
        for name, (shares, batching) in used.items()
    }
