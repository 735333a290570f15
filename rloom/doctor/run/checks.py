"""All checks, the most fundamental first, and what a finding explains."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from rloom.doctor.run import answers, credit, critic, numerics, policy, resources, reward
from rloom.doctor.run.finding import Fault, Finding, Severity
from rloom.doctor.run.history import History


@dataclass(frozen=True)
class Check:
    fault: Fault
    find: Callable[[History], Finding | None]

    def applies(self, names: Collection[str]) -> bool:
        """`names`: of the metrics that the run has."""
        wanted = self.fault.metrics
        return not wanted or any(name.startswith(wanted) for name in names)


# In this order findings are reported: what ends a run, what leaves nothing to learn from, what goes wrong in learning,
# what only costs time or memory.
ORDER = (
    Check(numerics.NONFINITE, numerics.nonfinite),
    Check(numerics.MEMORY_ERROR, numerics.out_of_memory),
    Check(numerics.FAILED, numerics.run_failed),
    Check(policy.MISMATCH, policy.rollout_mismatch),
    Check(reward.REWARD_ZERO, reward.reward_zero),
    Check(reward.REWARD_CONSTANT, reward.reward_constant),
    Check(reward.FAILURES, reward.reward_failures),
    Check(numerics.LEARNING_RATE, numerics.learning_rate_zero),
    Check(numerics.GRADIENT, numerics.gradient_explosion),
    Check(policy.CLIP, policy.clip_high),
    Check(policy.KL_FAULT, policy.kl_high),
    Check(reward.COLLAPSE, reward.reward_collapse),
    Check(credit.EQUAL_GROUPS, credit.equal_groups),
    Check(policy.STATIC, policy.policy_static),
    Check(answers.REPETITION, answers.repetition),
    Check(policy.ENTROPY_LOW, policy.entropy_collapse),
    Check(policy.ENTROPY_HIGH, policy.entropy_explosion),
    Check(answers.CUT, answers.answers_cut),
    Check(reward.HACKED, reward.reward_hacked),
    Check(answers.LENGTH, answers.length_drift),
    Check(credit.CREDIT, credit.credit_decay),
    Check(critic.CRITIC_STUCK, critic.critic_stuck),
    Check(numerics.SFT_LOSS, numerics.loss_not_falling),
    Check(reward.FALLS, reward.reward_falls),
    Check(resources.SLOW, resources.slow_stage),
    Check(resources.MEMORY, resources.memory_growth),
)
CHECKS: Mapping[str, Check] = {check.fault.kind: check for check in ORDER}

NO_SIGNAL = frozenset({"equal_groups", "policy_static", "critic_stuck", "credit_decay", "entropy_collapse"})
AFTER_COLLAPSE = frozenset({"repetition", "answers_cut", "length_drift", "entropy_explosion", "reward_falls"})
# kind -> kinds that are only its consequences, and are left out beside it
EXPLAINS: Mapping[str, frozenset[str]] = {
    "nonfinite": frozenset({"gradient_explosion", "run_failed", "policy_static", "critic_stuck", "credit_decay"}),
    "rollout_mismatch": frozenset({"reward_collapse", "reward_falls", "entropy_explosion"}),
    "reward_zero": NO_SIGNAL | {"reward_hacked", "length_drift"},
    "reward_constant": NO_SIGNAL | {"reward_hacked", "length_drift"},
    "reward_collapse": NO_SIGNAL | AFTER_COLLAPSE,
    "learning_rate_zero": frozenset({"policy_static", "credit_decay", "critic_stuck"}),
    "equal_groups": frozenset({"policy_static", "entropy_collapse"}),
    "policy_static": frozenset({"credit_decay"}),
    "credit_decay": frozenset({"critic_stuck"}),  # the critic's targets lack the reward in the same way
    "repetition": frozenset({"answers_cut", "length_drift"}),
    "answers_cut": frozenset({"length_drift"}),
}


def with_real_changes(finding: Finding, history: History) -> Finding:
    """Without values that the run has already, and without keys that it does not have.

    Supervised fine-tuning has fewer keys than RL training; its config.yaml has all of them.
    """
    keys = history.config
    changes = [change for change in finding.changes if change.differs_from(keys.get(change.key))]
    if history.is_supervised:
        changes = [change for change in changes if change.key in keys]
    return replace(finding, changes=tuple(changes))


def is_minor(finding: Finding) -> bool:
    """Less severe than its kind usually is: it explains nothing else and is reported last."""
    return CHECKS[finding.kind].fault.severity is Severity.ERROR and finding.severity is not Severity.ERROR


def diagnose(history: History) -> list[Finding]:
    """What is wrong with a run, the most fundamental fault first; without what is only a consequence of another."""
    found = {kind: finding for kind, check in CHECKS.items() if (finding := check.find(history)) is not None}
    explained = {
        consequence
        for kind, finding in found.items()
        if not is_minor(finding)
        for consequence in EXPLAINS.get(kind, ())
    }
    for kind in ("repetition", "answers_cut"):
        if kind in found and found[kind].severity is Severity.ERROR and kind not in explained:
            explained |= NO_SIGNAL  # no answer is complete
    kept = [with_real_changes(finding, history) for kind, finding in found.items() if kind not in explained]
    return sorted(kept, key=is_minor)  # stable
