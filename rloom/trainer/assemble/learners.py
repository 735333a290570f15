"""The roles that learn: an engine with an objective, a rhythm and a schedule."""

from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.algos.registry import resolve_policy_loss
from rloom.config.schema import Config, Optim
from rloom.runtime.group import Group
from rloom.trainer.assemble.models import sequence_ranks
from rloom.trainer.learning_rate import LearningRateSchedule
from rloom.trainer.roles import Learner, MiniBatching, Scorer


def schedule(optim: Optim, total_steps: int) -> LearningRateSchedule:
    return LearningRateSchedule(
        optim.lr, optim.warmup(total_steps), total_steps, optim.lr_scheduler_type, optim.min_lr_ratio
    )


def policy_learner(config: Config, group: Group, parameters: int, total_steps: int) -> Learner:
    actor = config.actor_rollout_ref.actor
    entry = resolve_policy_loss(actor.policy_loss.loss_mode)
    return Learner(
        "actor",
        group,
        objective=PolicyObjective(
            loss_mode=actor.policy_loss.loss_mode,
            loss_settings=loss_settings(config),
            aggregation=actor.loss_agg_mode or entry.aggregation or "token-mean",
            entropy_coefficient=actor.entropy_coeff,
            kl_coefficient=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_estimator=actor.kl_loss_type,
            measures_gap=config.actor_rollout_ref.rollout.calculate_log_probs,
        ),
        mini_batching=mini_batching(config, actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle),
        schedule=schedule(actor.optim, total_steps),
        balance=config.trainer.balance_batch,
        max_nonfinite=config.trainer.max_nonfinite_updates,
        parameters=parameters,
        sequence_ranks=sequence_ranks(actor, group.size),
    )


def loss_settings(config: Config) -> LossSettings:
    actor = config.actor_rollout_ref.actor
    return LossSettings(
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_dual=actor.clip_ratio_c,
        **actor.policy_loss.model_dump(exclude={"loss_mode"}),
    )


def critic_learner(config: Config, group: Group, parameters: int, total_steps: int) -> Learner:
    critic, (prompts, epochs) = config.critic, config.critic_updates
    return Learner(
        "critic",
        group,
        objective=ValueObjective(critic.cliprange_value, critic.loss_agg_mode),
        mini_batching=mini_batching(config, prompts, epochs, critic.shuffle),
        schedule=schedule(critic.optim, total_steps),
        balance=config.trainer.balance_batch,
        max_nonfinite=config.trainer.max_nonfinite_updates,
        parameters=parameters,
        sequence_ranks=sequence_ranks(critic, group.size),
    )


def reference_scorer(config: Config, policy: Group, reference: Group | None) -> Scorer | None:
    """Where the loop itself needs the reference's log-probs: not for a KL loss over the whole vocabulary."""
    actor, balance = config.actor_rollout_ref.actor, config.trainer.balance_batch
    if not config.kl_in_reward and not (actor.use_kl_loss and actor.kl_loss_type != "full"):
        return None
    group = policy if reference is None else reference
    return Scorer(group, balance, reference=reference is None, sequence_ranks=sequence_ranks(actor, group.size))


def mini_batching(config: Config, prompts: int, epochs: int, shuffle: bool) -> MiniBatching:
    return MiniBatching(prompts, epochs, shuffle, config.data.seed, horizon=config.data.max_response_length)
