"""Rules over the keys of the policy's update: rollout correction, the ratio of a run whose answers may be older than
its weights, and answers that are left out."""

from collections.abc import Iterator

from rloom.algos.needs import LOSS_KEY, LossNeeds
from rloom.algos.off_policy import RatioSettings, ratio_faults, ratio_notices
from rloom.algos.rejection import LEVELS, bounds_of, criteria, number
from rloom.config.base import ACTOR
from rloom.config.derived import Needs, loss_mode, needs_old_logprobs
from rloom.config.schema import Config

KEY = "algorithm.rollout_correction"
SKIP_KEY = f"{ACTOR}.skip_zero_advantages"


def correction_faults(config: Config) -> Iterator[str]:
    section = config.algorithm.rollout_correction
    yield from bypass_faults(config)
    if section.rollout_rs is not None and section.rollout_rs_threshold is None:
        yield (
            f"{KEY}.rollout_rs={section.rollout_rs} needs {KEY}.rollout_rs_threshold, the largest ratio kept: "
            "about 2 for token and sequence, 1.001 for geometric"
        )
        return
    try:
        bounds = bounds_of(section.rollout_is_threshold)
        raised = section.rollout_is_threshold_lower
        if raised is not None and (bounds.lower is not None or raised > bounds.upper):
            yield (
                f"{KEY}.rollout_is_threshold_lower={raised} with {KEY}.rollout_is_threshold="
                f"{section.rollout_is_threshold}: it takes one upper bound that is not below it, such as 5.0"
            )
    except ValueError as error:
        yield f"{KEY}.rollout_is_threshold={section.rollout_is_threshold}: {error}"
    try:
        check_rejection(config)
    except ValueError as error:
        yield f"{KEY}.rollout_rs={section.rollout_rs} with rollout_rs_threshold={section.rollout_rs_threshold}: {error}"
        return
    lower, upper = section.rollout_rs_threshold_lower, section.rollout_rs_threshold
    if lower is not None and upper is not None and section.rollout_rs in LEVELS and lower > float(upper):
        yield f"{KEY}.rollout_rs_threshold_lower={lower} is above {KEY}.rollout_rs_threshold={upper}; swap them"


def check_rejection(config: Config) -> None:
    section = config.algorithm.rollout_correction
    if section.rollout_rs is None or section.rollout_rs_threshold is None:
        return
    if section.rollout_rs in LEVELS:
        number(section.rollout_rs_threshold)
        return
    criteria(section.rollout_rs, section.rollout_rs_threshold)
    if section.rollout_rs_threshold_lower is not None:
        raise ValueError(
            "rollout_rs_threshold has both bounds of such a criterion; leave rollout_rs_threshold_lower out"
        )


def bypass_faults(config: Config) -> Iterator[str]:
    section = config.algorithm.rollout_correction
    if not section.bypass_mode:
        return
    reinforce = section.loss_type == "reinforce"
    if section.rollout_is is not None and not reinforce:
        yield (
            f"{KEY}.bypass_mode=True leaves nothing to weight: the clipped ratio is to the rollout engine's log-probs. "
            f"Leave out {KEY}.rollout_is, or use {KEY}.loss_type=reinforce"
        )
    if section.rollout_is is not None and section.rollout_is_batch_normalize:
        yield (
            f"{KEY}.rollout_is_batch_normalize=True needs the weights of the whole batch, and with {KEY}.bypass_mode="
            "True each update computes those of its tokens; leave one of the two out"
        )
    if reinforce and config.is_given(f"{ACTOR}.policy_loss.loss_mode"):
        yield f"{KEY}.loss_type=reinforce takes the place of {ACTOR}.policy_loss.loss_mode; leave one of the two out"


def ratio_settings(config: Config, needs: Needs) -> RatioSettings:
    """For algos/off_policy.py."""
    section, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    return RatioSettings(
        bypass_mode=section.bypass_mode,
        rollout_is=section.rollout_is,
        rollout_is_threshold=section.rollout_is_threshold,
        rollout_rs=section.rollout_rs,
        weights_refused=section.rollout_is is None and config.is_given(f"{KEY}.rollout_is"),
        needs_old_logprobs=needs_old_logprobs(config, needs.loss),
        updates=-(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs,
        loss_mode=loss_mode(config),
        ratio_of_answers=needs.loss.ratio_of_answers,
    )


def off_policy_faults(config: Config, needs: Needs, staleness: int) -> list[str]:
    """For a run whose answers may be so many versions older than the weights that they train, and go on with new
    weights."""
    return [*ratio_faults(ratio_settings(config, needs), staleness, mixed=staleness > 0)]


def off_policy_notices(config: Config, needs: Needs, staleness: int) -> list[str]:
    return [*ratio_notices(ratio_settings(config, needs), mixed=staleness > 0)]


def skip_faults(config: Config, loss: LossNeeds) -> Iterator[str]:
    """What has a gradient in answers whose advantage is 0."""
    actor = config.actor_rollout_ref.actor
    if not actor.skip_zero_advantages:
        return
    if actor.entropy_coeff:
        yield (
            f"{SKIP_KEY}=True: the entropy bonus of {ACTOR}.entropy_coeff={actor.entropy_coeff:g} has a gradient at "
            f"every token, whatever its advantage; use {ACTOR}.entropy_coeff=0, or leave {SKIP_KEY} out"
        )
    if actor.use_kl_loss:
        yield (
            f"{SKIP_KEY}=True: the KL of {ACTOR}.use_kl_loss=True has a gradient at every token, whatever its "
            f"advantage; use {ACTOR}.use_kl_loss=False, or leave {SKIP_KEY} out"
        )
    if not loss.scales_with_advantage:
        yield (
            f"{SKIP_KEY}=True: {LOSS_KEY}={loss_mode(config)} is not known to have no gradient where the advantage is "
            f"0; use another loss, such as vanilla, or leave {SKIP_KEY} out. A loss of your own declares it with "
            "PolicyLossEntry(..., scales_with_advantage=True)"
        )


def dapo_faults(config: Config) -> Iterator[str]:
    n, limit = config.actor_rollout_ref.rollout.n, config.data.max_response_length
    buffer = config.reward_model.overlong_buffer
    groups = config.algorithm.filter_groups
    if groups.enable and groups.mean_score_range is None and n < 2:
        yield (
            "algorithm.filter_groups.enable=True keeps groups with different scores, and "
            f"actor_rollout_ref.rollout.n={n} makes groups of one; use 2 or more"
        )
    if config.algorithm.mask_truncated_answers and config.actor_rollout_ref.rollout.ignore_eos:
        yield (
            "algorithm.mask_truncated_answers=True leaves every answer out of the loss with "
            "actor_rollout_ref.rollout.ignore_eos=True, which generates to the length limit; set one to False"
        )
    if config.data.max_length is not None and config.data.max_length <= config.data.max_prompt_length:
        yield (
            f"data.max_length={config.data.max_length}: a prompt of data.max_prompt_length="
            f"{config.data.max_prompt_length} tokens would leave none for its answer; use a larger one, or "
            "a smaller data.max_prompt_length"
        )
    ranges = {
        "algorithm.filter_groups.mean_score_range": groups.mean_score_range,
        "reward_model.score_range": config.reward_model.score_range,
    }
    for key, bounds in ranges.items():
        if bounds is not None and bounds[0] >= bounds[1]:
            yield f"{key}={bounds}: the first is not below the second; swap them"
    if buffer.enable and buffer.len > limit:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} is more than data.max_response_length={limit}; "
            f"use {limit} or less"
        )
