"""What each estimator and each policy loss requires, and which settings it reads. Imports no torch.

registry.py adds the functions. The keys of a run are checked against these tables before torch is imported.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

ESTIMATOR_KEY = "algorithm.adv_estimator"
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
ESTIMATOR_GROUP, LOSS_GROUP = "rloom.estimators", "rloom.policy_losses"  # entry points of other packages

ESTIMATOR_SETTINGS = frozenset({"gamma", "lam", "norm_adv_by_std_in_grpo"})  # keys of `algorithm`
SAPO = frozenset({"tau_pos", "tau_neg"})
CLIP_COV = frozenset({"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"})
KL_COV = frozenset({"kl_cov_ratio", "ppo_kl_coef"})
CLIP = frozenset({"clip_ratio"})  # includes clip_ratio_low and clip_ratio_high
LOSS_SETTINGS = CLIP | {"clip_ratio_c"} | SAPO | CLIP_COV | KL_COV  # keys of `actor` and `actor.policy_loss`

BY_SEQUENCE = "seq-mean-token-mean"

SMALLEST_WEIGHT = (
    0.05  # of the reward in the advantage of a token: below it, the reward hardly changes the token's probability
)


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    needs_critic: bool = False
    min_group: int = 1  # fewest answers per prompt
    needs_greedy: bool = False  # a greedy answer to each prompt, scored
    normalizes: bool = False  # its definition ends with (A - mean) / std over the batch
    reads: frozenset[str] = ESTIMATOR_SETTINGS  # keys of `algorithm` that change its result
    # (gamma, lam) -> factor between the weights of the final reward in the advantages of a token and of the one before
    discount: Callable[[float, float], float] = lambda gamma, lam: 1.0


@dataclass(frozen=True, kw_only=True)
class LossNeeds:
    needs_old_logprobs: bool = False  # even in a single update
    aggregation: str | None = None  # the only one it is defined for; None: as configured
    ratio_of_answers: bool = False  # one ratio for all tokens of an answer, the geometric mean of theirs
    weighs_answers: bool = False  # rollout correction multiplies by the geometric mean of an answer's weights
    scales_with_advantage: bool = False  # no gradient in an answer whose advantage is 0 at every token
    reads: frozenset[str] = LOSS_SETTINGS  # keys of `actor` and `actor.policy_loss` that change its result


NOTHING: frozenset[str] = frozenset()
GAMMA = frozenset({"gamma"})
NORM = frozenset({"norm_adv_by_std_in_grpo"})
IN_GROUPS = EstimatorNeeds(min_group=2, reads=NOTHING)

ESTIMATORS = {
    "gae": EstimatorNeeds(
        needs_critic=True, normalizes=True, reads=GAMMA | {"lam"}, discount=lambda gamma, lam: gamma * lam
    ),
    "rloo": IN_GROUPS,
    "grpo": EstimatorNeeds(min_group=2, reads=NORM),
    "reinforce_plus_plus": EstimatorNeeds(normalizes=True, reads=GAMMA, discount=lambda gamma, lam: gamma),
    "reinforce_plus_plus_baseline": EstimatorNeeds(min_group=2, normalizes=True, reads=NOTHING),
    "remax": EstimatorNeeds(needs_greedy=True, reads=GAMMA, discount=lambda gamma, lam: gamma),
    "opo": IN_GROUPS,
    "gpg": IN_GROUPS,
    "grpo_passk": EstimatorNeeds(min_group=2, reads=NORM),
}

LOSSES = {
    "vanilla": LossNeeds(scales_with_advantage=True, reads=CLIP | {"clip_ratio_c"}),
    "gspo": LossNeeds(aggregation=BY_SEQUENCE, ratio_of_answers=True, scales_with_advantage=True, reads=CLIP),
    "sequence_ratio": LossNeeds(aggregation="seq-mean-token-sum", scales_with_advantage=True, reads=CLIP),
    "sapo": LossNeeds(aggregation=BY_SEQUENCE, scales_with_advantage=True, reads=SAPO),
    "gpg": LossNeeds(scales_with_advantage=True, reads=NOTHING),
    "cispo": LossNeeds(scales_with_advantage=True, reads=CLIP),
    "clip_cov": LossNeeds(needs_old_logprobs=True, scales_with_advantage=True, reads=CLIP | CLIP_COV),
    "kl_cov": LossNeeds(needs_old_logprobs=True, reads=KL_COV),
    "geo_mean": LossNeeds(
        aggregation=BY_SEQUENCE, ratio_of_answers=True, weighs_answers=True, scales_with_advantage=True, reads=CLIP
    ),
}


def reach(factor: float) -> int:
    """Tokens before the reward whose advantage has at least SMALLEST_WEIGHT of it. 0.95 -> 58"""
    assert factor < 1  # else it reaches all
    return int(math.log(SMALLEST_WEIGHT) / math.log(factor)) if factor > 0 else 0
