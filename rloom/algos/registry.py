"""The catalogue: a name -> the function and what it needs. Adding an algorithm is one function and one line here.

A name with a colon, `my_module:my_function` or `./my_file.py:my_function`, is one from outside the package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rloom.algos import covariance_losses, over_time, sequence_losses, token_losses, within_groups
from rloom.algos.advantages import AdvantageSettings, Evidence
from rloom.algos.outside import check_two_arguments, load_outside
from rloom.algos.policy_losses import LossSettings, PolicyLoss
from rloom.batch import Advantages, TrainBatch
from rloom.errors import ConfigError

Estimator = Callable[[Evidence, AdvantageSettings], Advantages]

ESTIMATOR_KEY = "algorithm.adv_estimator"
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"


@dataclass(frozen=True)
class Algorithm:
    advantage: Estimator
    needs_critic: bool = False
    min_group: int = 1  # fewest answers to a prompt that it can compare
    needs_greedy: bool = False  # a greedy answer to each prompt, scored


@dataclass(frozen=True)
class PolicyLossEntry:
    loss: PolicyLoss
    needs_old_logprobs: bool = False  # even where the update is exactly on-policy
    aggregation: str | None = None  # the one it is defined with; None: any, as configured
    weighs_answers: bool = False  # rollout correction's weights enter as their geometric mean over the answer
    choose: Callable[[TrainBatch, LossSettings], Tensor] | None = None  # mini-batch -> chosen_T, before any split


ALGORITHMS: dict[str, Algorithm] = {
    "gae": Algorithm(over_time.gae, needs_critic=True),
    "rloo": Algorithm(within_groups.rloo, min_group=2),
    "grpo": Algorithm(within_groups.grpo, min_group=2),
    "reinforce_plus_plus": Algorithm(over_time.reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Algorithm(within_groups.reinforce_plus_plus_baseline, min_group=2),
    "remax": Algorithm(over_time.remax, needs_greedy=True),
    "opo": Algorithm(within_groups.opo, min_group=2),
    "gpg": Algorithm(within_groups.gpg, min_group=2),
    "grpo_passk": Algorithm(within_groups.grpo_passk, min_group=2),
}

BY_SEQUENCE = "seq-mean-token-mean"

POLICY_LOSSES: dict[str, PolicyLossEntry] = {
    "vanilla": PolicyLossEntry(token_losses.vanilla),
    "gspo": PolicyLossEntry(sequence_losses.gspo, aggregation=BY_SEQUENCE),
    "sapo": PolicyLossEntry(token_losses.sapo, aggregation=BY_SEQUENCE),
    "gpg": PolicyLossEntry(token_losses.gpg),
    "cispo": PolicyLossEntry(token_losses.cispo),
    "clip_cov": PolicyLossEntry(
        covariance_losses.clip_cov, needs_old_logprobs=True, choose=covariance_losses.choose_for_clip_cov
    ),
    "kl_cov": PolicyLossEntry(
        covariance_losses.kl_cov, needs_old_logprobs=True, choose=covariance_losses.choose_for_kl_cov
    ),
    "geo_mean": PolicyLossEntry(sequence_losses.geo_mean, aggregation=BY_SEQUENCE, weighs_answers=True),
}


def resolve_algorithm(name: str) -> Algorithm:
    """The entry of that name. A plain function from outside gets the default needs; an Algorithm brings its own."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    found = from_outside(ESTIMATOR_KEY, name, list(ALGORITHMS))
    if isinstance(found, Algorithm):
        return found
    check_two_arguments(ESTIMATOR_KEY, name, found, "(evidence, settings)", "an Algorithm")
    return Algorithm(found)


def resolve_policy_loss(name: str) -> PolicyLossEntry:
    """The entry of that name. A plain function from outside gets the default needs; a PolicyLossEntry its own."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    found = from_outside(LOSS_KEY, name, list(POLICY_LOSSES))
    if isinstance(found, PolicyLossEntry):
        return found
    check_two_arguments(LOSS_KEY, name, found, "(terms, settings)", "a PolicyLossEntry")
    return PolicyLossEntry(found)


def from_outside(key: str, name: str, known: list[str]) -> Any:
    if ":" not in name:
        raise ConfigError(
            f"{key}={name}: there is no such entry; use one of {', '.join(known)}, "
            "or your own as my_module:my_function or ./my_file.py:my_function"
        )
    return load_outside(key, name)
