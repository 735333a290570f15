"""What an algorithm needs, by name: the catalogue itself imports torch, and a plan should not wait for that.

A test holds these tables to the catalogue. What a user brings as file.py:name is not run here: it is taken to need a
critic where `critic.enable` says so, and nothing else.
"""

from dataclasses import dataclass

from rloom.config.schema import Config
from rloom.errors import ConfigError


@dataclass(frozen=True)
class Needs:
    needs_critic: bool = False
    min_group: int = 1
    needs_greedy: bool = False


IN_GROUPS = Needs(min_group=2)
ESTIMATORS = {
    "gae": Needs(needs_critic=True),
    "rloo": IN_GROUPS,
    "grpo": IN_GROUPS,
    "reinforce_plus_plus": Needs(),
    "reinforce_plus_plus_baseline": IN_GROUPS,
    "remax": Needs(needs_greedy=True),
    "opo": IN_GROUPS,
    "gpg": IN_GROUPS,
    "grpo_passk": IN_GROUPS,
}
# policy loss -> whether it asks for old log-probs even where the update is exactly on-policy
LOSSES = {
    "vanilla": False,
    "gspo": False,
    "sapo": False,
    "gpg": False,
    "cispo": False,
    "clip_cov": True,
    "kl_cov": True,
    "geo_mean": False,
}


def needs_of(config: Config) -> Needs:
    name = config.algorithm.adv_estimator
    if ":" in name:
        return Needs(needs_critic=bool(config.critic.enable))
    if name not in ESTIMATORS:
        raise unknown("algorithm.adv_estimator", name, list(ESTIMATORS))
    return ESTIMATORS[name]


def needs_old_logprobs(config: Config) -> bool:
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if ":" not in name and name not in LOSSES:
        raise unknown("actor_rollout_ref.actor.policy_loss.loss_mode", name, list(LOSSES))
    asked = config.algorithm.use_kl_in_reward or config.algorithm.rollout_correction.enabled
    return not config.on_policy or LOSSES.get(name, False) or asked


def unknown(key: str, name: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"{key}={name}: there is no such entry; use one of {', '.join(known)}, "
        "or your own as my_module:my_function or ./my_file.py:my_function"
    )
