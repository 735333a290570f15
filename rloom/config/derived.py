"""What several keys determine together: the requirements of the algorithm, the sizes of passes, the rewards of a run.

`rloom train` and `rloom plan` call the same functions. No torch here. A user's own algorithm (file.py:name) is not
loaded here. It is assumed to need a critic if `critic.enable` is set, to read every setting, and to have no gradient
where the advantage is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rloom.algos.needs import (
    ESTIMATOR_GROUP,
    ESTIMATOR_KEY,
    ESTIMATORS,
    LOSS_GROUP,
    LOSS_KEY,
    LOSSES,
    EstimatorNeeds,
    LossNeeds,
)
from rloom.config.base import GIVEN_IN_PYTHON
from rloom.config.reward_sections import PartWeight
from rloom.config.schema import Actor, Config, Critic
from rloom.plugins import installed, is_own, unknown_entry
from rloom.rewards.kinds import PARTS, RewardKind, kinds_of

ONE_TURN_LOOP = "single_turn_agent"


def nearest_divisors(whole: int, wanted: int) -> str:
    """ "64 or 128": the divisors of `whole` on either side of `wanted`."""
    return on_either_side(divisors(whole), wanted)


def on_either_side(ascending: Sequence[int], wanted: int) -> str:
    """The numbers on either side of `wanted`, as text; empty if there are none."""
    below = [number for number in ascending if number < wanted][-1:]
    above = [number for number in ascending if number > wanted][:1]
    return " or ".join(map(str, below + above))


def divisors(whole: int) -> list[int]:
    return [d for d in range(1, whole + 1) if whole % d == 0]


@dataclass(frozen=True)
class Needs:
    """The requirements of a run's estimator and loss: registry entries, or their declarations in algos/needs.py."""

    estimator: EstimatorNeeds
    loss: LossNeeds


REINFORCE = "gpg"  # its loss: log-probs times advantages


def loss_mode(config: Config) -> str:
    """The policy loss of the run."""
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return REINFORCE
    return config.actor_rollout_ref.actor.policy_loss.loss_mode


def declared_needs(config: Config) -> Needs:
    estimator, loss = config.algorithm.adv_estimator, loss_mode(config)
    if estimator not in ESTIMATORS and not is_own(estimator, ESTIMATOR_GROUP):
        raise unknown_entry(ESTIMATOR_KEY, estimator, [*ESTIMATORS, *installed(ESTIMATOR_GROUP)])
    if loss not in LOSSES and not is_own(loss, LOSS_GROUP):
        raise unknown_entry(LOSS_KEY, loss, [*LOSSES, *installed(LOSS_GROUP)])
    own = EstimatorNeeds(needs_critic=bool(config.critic.enable))
    return Needs(ESTIMATORS.get(estimator, own), LOSSES.get(loss, LossNeeds(scales_with_advantage=True)))


def brings_own_algorithm(config: Config) -> bool:
    """Whether estimator or loss is the user's own: its requirements are known after its file is loaded."""
    estimator, loss = config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode
    own_estimator = estimator not in ESTIMATORS and is_own(estimator, ESTIMATOR_GROUP)
    return own_estimator or (loss not in LOSSES and is_own(loss, LOSS_GROUP))


def needs_old_logprobs(config: Config, loss: LossNeeds) -> bool:
    """A single update needs none, unless the loss, the step's KL or a rollout correction that was set reads them."""
    measures_kl = config.kl_in_reward or config.kl_only_measured
    correction = config.algorithm.rollout_correction
    also_read = measures_kl or (correction.enabled and not correction.bypass_mode)
    return not config.updates_once or loss.needs_old_logprobs or also_read


def measures_mismatch(config: Config) -> bool:
    """Whether the log-probs of rollout engine and trainer are compared."""
    return config.actor_rollout_ref.rollout.calculate_log_probs or config.algorithm.rollout_correction.enabled


def ranks_per_share(role: Actor | Critic, ranks: int) -> int:
    """Ranks that get the same samples. The reference has the actor's; a single rank (evaluation) divides nothing."""
    return 1 if ranks == 1 else role.ulysses_sequence_parallel_size * model_ranks(role, ranks)


def model_ranks(role: Actor | Critic, ranks: int) -> int:
    """Ranks that divide one copy of the model by tensor and pipeline parallelism."""
    return role.megatron.model_ranks if ranks > 1 and role.kind.model_parallel else 1


@dataclass(frozen=True)
class RewardPart:
    name: str
    source: str  # the name of its kind
    kind: RewardKind
    weight: float = 1.0
    normalize: bool = False
    skip_failed: bool = False

    @property
    def optional(self) -> bool:
        """A function of the calling program that is a part by its own name: None means that it does not apply."""
        return self.kind.takes_function and self.name not in PARTS

    @property
    def settings(self) -> dict[str, Any]:
        """What distinguishes it from the parts of another run."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kind"}


@dataclass(frozen=True)
class RewardKinds:
    """The kinds of rewards that a run could have and those that the user set, by name."""

    every: Mapping[str, RewardKind]
    chosen: Mapping[str, RewardKind]
    default: str  # the kind of a run in which none is set

    @classmethod
    def of(cls, config: Config) -> "RewardKinds":
        every = with_named_functions(config, kinds_of(config.reward_model.kinds))
        chosen = {name: kind for name, kind in every.items() if kind.is_set(config)}
        return cls(
            every, chosen, next(name for name, kind in every.items() if kind.is_default and kind.is_default(config))
        )

    @property
    def part_names(self) -> list[str]:
        return list(dict.fromkeys(part for kind in self.every.values() for part in kind.parts))

    @property
    def alone(self) -> list[str]:
        """Those that can be the only reward of a run."""
        return [name for name, kind in self.chosen.items() if kind.alone]

    def computing(self, part: str) -> str | None:
        """The first that is set of those that can compute the part."""
        return next((name for name, kind in self.chosen.items() if part in kind.parts), None)

    def ways(self, part: str) -> str:
        """The keys that set a reward for the part."""
        return " or ".join(kind.switch for kind in self.every.values() if part in kind.parts)


def with_named_functions(config: Config, every: Mapping[str, RewardKind]) -> Mapping[str, RewardKind]:
    """Several functions of the calling program are parts of a mix by their own names."""
    mix = config.reward_model.composite
    if config.custom_reward_function.path != GIVEN_IN_PYTHON or not mix.enable:
        return every
    others = {part for kind in every.values() for part in kind.parts}
    named = tuple(name for name in mix.weights if name not in others)
    if not named:
        return every
    return {name: replace(kind, parts=named) if kind.takes_function else kind for name, kind in every.items()}


def reward_parts(config: Config) -> list[RewardPart]:
    """The parts of the reward of a run. `config` has passed `check`."""
    reward, kinds = config.reward_model, RewardKinds.of(config)
    if not reward.composite.enable:
        only = next(iter(kinds.alone), kinds.default)
        kind = kinds.every[only]
        return [RewardPart(kind.parts[0], only, kind, normalize=reward.normalize)]
    parts = []
    for name, given in reward.composite.weights.items():
        weight = given if isinstance(given, PartWeight) else PartWeight(weight=given)
        normalize = reward.composite.normalize if weight.normalize is None else weight.normalize
        chosen = kinds.computing(name)
        assert chosen is not None  # checked
        parts.append(RewardPart(name, chosen, kinds.every[chosen], weight.weight, normalize, weight.failed == "skip"))
    return parts


def turns_text(config: Config) -> str | None:
    """What answers the policy between its turns, and the limits of an episode. None: answers have one turn."""
    rollout = config.actor_rollout_ref.rollout
    keys, agent = rollout.multi_turn, rollout.agent
    sources = {
        "environment": keys.environment,
        "tools": keys.function_tool_path or keys.tool_config_path,
        "interaction": keys.interaction_config_path,
        "agent": agent.path or agent.command or agent.agent_loop_config_path or agent.default_agent_loop,
    }
    found = [f"{name} {source}" for name, source in sources.items() if source not in (None, ONE_TURN_LOOP)]
    if not found:
        return None
    turns = keys.max_assistant_turns
    limits = [
        "turns without limit" if turns is None else f"at most {turns} turn{'s' * (turns > 1)}",
        f"{config.data.max_response_length:,} tokens after the prompt",
        f"{keys.max_turn_length:,} tokens a turn" if keys.max_turn_length is not None else "",
        f"{keys.tool_timeout_s:g} s a call",
        f"{keys.episode_timeout_s:g} s an episode" if keys.episode_timeout_s is not None else "",
    ]
    return f"{', '.join(found)}; {', '.join(filter(None, limits))}"
