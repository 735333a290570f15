"""All checks, the most fundamental first, and what a finding explains."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from rloom.doctor.run import ahead, answers, episodes, learning, numerics, policy, reward
from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import History


@dataclass(frozen=True)
class Check:
    fault: Fault
    find: Callable[[History], Finding | None]

    def applies(self, names: Collection[str]) -> bool:
        """`names`: of the metrics that the run has."""
        wanted = self.fault.metrics
        return not wanted or any(name.startswith(wanted) for name in names)

    @property
    def is_of_turns(self) -> bool:
        """Whether only answers of several turns can have the fault."""
        return all(name.startswith(("episode/", "tool/")) for name in self.fault.metrics) and bool(self.fault.metrics)


# In this order findings of one severity are reported: what ends a run, what leaves nothing to learn from, rewards that
# are not the goal, what goes wrong in learning, what only costs time or memory.
ORDER = (
    Check(numerics.NONFINITE, numerics.nonfinite),
    Check(numerics.MEMORY_ERROR, numerics.out_of_memory),
    Check(numerics.FAILED, numerics.run_failed),
    Check(policy.MISMATCH, policy.rollout_mismatch),
    Check(episodes.ENVIRONMENTS, episodes.environment_failures),
    Check(answers.PROMPTS_CUT, answers.prompts_cut),
    Check(answers.REPEATED_PROMPTS, answers.repeated_prompts),
    Check(answers.SAMPLING_RANDOM, answers.sampling_random),
    Check(reward.REWARD_ZERO, reward.reward_zero),
    Check(reward.REWARD_CONSTANT, reward.reward_constant),
    Check(reward.FAILURES, reward.reward_failures),
    Check(reward.SIGN, reward.reward_sign),
    Check(reward.LENGTH_REWARDED, reward.length_rewarded),
    Check(episodes.CALLS_REWARDED, episodes.tool_calls_rewarded),
    Check(reward.REWARD_NOISE, reward.reward_noise),
    Check(reward.RIGHT_NOT_REWARDED, reward.right_not_rewarded),
    Check(reward.HACKED, reward.reward_hacked),
    Check(numerics.LEARNING_RATE, numerics.learning_rate_zero),
    Check(numerics.GRADIENT, numerics.gradient_explosion),
    Check(policy.CLIP, policy.clip_high),
    Check(policy.KL_FAULT, policy.kl_high),
    Check(ahead.STALENESS, ahead.staleness_hurts),
    Check(learning.COLLAPSE, learning.reward_collapse),
    Check(answers.LOW_SCORE, answers.low_score),
    Check(answers.EQUAL_GROUPS, answers.equal_groups),
    Check(policy.STATIC, policy.policy_static),
    Check(answers.REPETITION, answers.repetition),
    Check(policy.ENTROPY_LOW, policy.entropy_collapse),
    Check(policy.ENTROPY_HIGH, policy.entropy_explosion),
    Check(episodes.TIMED_OUT, episodes.tool_timeouts),
    Check(episodes.TOOL_ERRORS, episodes.tool_errors),
    Check(episodes.TOOLS_UNUSED, episodes.tools_unused),
    Check(episodes.AT_LIMITS, episodes.episodes_at_limit),
    Check(answers.CUT, answers.answers_cut),
    Check(learning.APART, learning.validation_apart),
    Check(answers.LENGTH, answers.length_drift),
    Check(policy.CREDIT, policy.credit_decay),
    Check(policy.CRITIC_STUCK, policy.critic_stuck),
    Check(numerics.SFT_LOSS, numerics.loss_not_falling),
    Check(learning.FALLS, learning.reward_falls),
    Check(learning.NO_PROGRESS, learning.no_progress),
    Check(learning.UNUSUAL, lambda history: learning.unusual_keys(history, frozenset())),
    Check(episodes.REWRITES, episodes.past_rewritten),
    Check(ahead.QUEUE, ahead.queue_grows),
    Check(ahead.STARVING, ahead.starving_trainer),
    Check(numerics.SLOW, numerics.slow_stage),
    Check(numerics.MEMORY, numerics.memory_growth),
)
CHECKS: Mapping[str, Check] = {check.fault.kind: check for check in ORDER}

NO_SIGNAL = frozenset(
    {*("equal_groups", "policy_static", "critic_stuck", "credit_decay", "entropy_collapse", "no_progress"), "low_score"}
)
AFTER_COLLAPSE = frozenset(
    {
        *("repetition", "answers_cut", "length_drift", "entropy_explosion", "reward_falls", "clip_high", "kl_high"),
        *("gradient_explosion", "reward_hacked", "validation_apart"),
    }
)
OTHER_GOAL = NO_SIGNAL | AFTER_COLLAPSE | {"reward_collapse", "right_not_rewarded"}
# kind -> kinds that are only its consequences, and are left out beside it
EXPLAINS: Mapping[str, frozenset[str]] = {
    "nonfinite": frozenset({"gradient_explosion", "run_failed", "policy_static", "critic_stuck", "credit_decay"}),
    "rollout_mismatch": NO_SIGNAL | AFTER_COLLAPSE | {"reward_collapse", "sampling_random"},
    "prompts_cut": NO_SIGNAL | {"reward_zero", "repeated_prompts", "validation_apart"},
    "sampling_random": NO_SIGNAL | {"reward_zero", "answers_cut", "repetition", "reward_noise"},
    "environment_failures": frozenset({"reward_failures"}),
    "tool_timeouts": frozenset({"tool_errors"}),
    "tool_calls_rewarded": OTHER_GOAL,
    "reward_zero": NO_SIGNAL | {"reward_hacked", "length_drift"},
    "reward_constant": NO_SIGNAL | {"reward_hacked", "length_drift"},
    "repeated_prompts": frozenset({"validation_apart", "no_progress"}),
    "reward_sign": OTHER_GOAL | {"length_rewarded"},
    "length_rewarded": OTHER_GOAL,
    "reward_noise": frozenset(
        {"no_progress", "reward_falls", "validation_apart", "reward_hacked", "critic_stuck", "right_not_rewarded"}
    ),
    "right_not_rewarded": NO_SIGNAL,
    "reward_hacked": OTHER_GOAL - {"reward_collapse"},
    "reward_collapse": NO_SIGNAL | AFTER_COLLAPSE,
    "learning_rate_zero": frozenset(
        {"policy_static", "credit_decay", "critic_stuck", "no_progress", "loss_not_falling"}
    ),
    "low_score": NO_SIGNAL | {"length_drift", "reward_falls", "entropy_explosion", "validation_apart"},
    "equal_groups": frozenset({"policy_static", "entropy_collapse", "no_progress", "right_not_rewarded"}),
    "policy_static": frozenset({"credit_decay", "no_progress"}),
    "credit_decay": frozenset({"critic_stuck", "no_progress"}),  # the critic's targets lack the reward in the same way
    "critic_stuck": frozenset({"no_progress"}),
    "entropy_collapse": frozenset({"no_progress"}),
    "entropy_explosion": frozenset({"no_progress"}),
    "repetition": frozenset({"answers_cut", "length_drift"}),
    "answers_cut": frozenset({"length_drift"}),
    "reward_falls": frozenset({"no_progress"}),
    "starving_trainer": frozenset({"slow_stage"}),
}
RANK = {severity: place for place, severity in enumerate(Severity)}


def with_real_changes(finding: Finding, history: History) -> Finding:
    """Without values that the run has already, and without keys that it does not have.

    Supervised fine-tuning has fewer keys than RL training; its config.yaml has all of them.
    """
    keys = history.config
    kept = [one for one in finding.advice if not isinstance(one, Change) or one.differs_from(keys.get(one.key))]
    if history.is_supervised:
        kept = [one for one in kept if not isinstance(one, Change) or one.key in keys]
    return replace(finding, advice=tuple(kept))


def is_minor(finding: Finding) -> bool:
    """Less severe than its kind usually is: it explains nothing else, and comes after others as severe."""
    return CHECKS[finding.kind].fault.severity is Severity.ERROR and finding.severity is not Severity.ERROR


def diagnose(history: History) -> list[Finding]:
    """What is wrong with a run, errors first; without what is only a consequence of another finding."""
    found = {
        kind: finding
        for kind, check in CHECKS.items()
        if kind != learning.UNUSUAL.kind and (finding := check.find(history)) is not None
    }
    explained = {
        consequence
        for kind, finding in found.items()
        if not is_minor(finding)
        for consequence in EXPLAINS.get(kind, ())
        if consequence != kind
    }
    for kind in ("repetition", "answers_cut", "repeated_prompts", "episodes_at_limit"):
        if kind in found and found[kind].severity is Severity.ERROR and kind not in explained:
            explained |= {*NO_SIGNAL, "reward_zero", "reward_constant"}  # no answer is complete, or can be right
    kept = [finding for kind, finding in found.items() if kind not in explained]
    unusual = learning.unusual_keys(history, frozenset(key for finding in kept for key in finding.keys))
    kept = [*kept, *([unusual] if unusual is not None else [])]
    order = list(CHECKS)
    kept.sort(key=lambda finding: (RANK[finding.severity], is_minor(finding), order.index(finding.kind)))
    return [with_real_changes(finding, history) for finding in kept]
