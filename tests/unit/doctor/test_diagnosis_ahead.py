"""The checks of runs that generate ahead of training: healthy ones, and each fault with its cause."""

from collections.abc import Mapping
from typing import Any

import pytest

from rloom.doctor.run.checks import diagnose
from rloom.doctor.run.finding import Finding, Severity
from rloom.doctor.run.live import LiveDiagnosis
from tests.unit.doctor.histories import AHEAD, COLOCATED, FAULTY, SEPARATE, Values, history, kinds

CARRIED, DROPPED = "rollout/carried_answers", "training/off_policy/dropped_groups"
WORST = "training/off_policy/trajectory_staleness_worst"
WAIT, IDLE, K3 = "training/wait_s", "rollout/idle_s", "rollout_corr/k3_kl"
BATCHES = "trainer.v1.separate_async.num_warmup_batches"
# of 10 s a step, 5 s generate and 5 s train
IN_TURN: Values = {**AHEAD, WAIT: 5.0, IDLE: 5.0, "timing_s/gen": 4.9, "timing_s/update_actor": 4.0}


def only(values: Values, keys: Mapping[str, Any] = SEPARATE, steps: int = 20) -> Finding:
    [finding] = diagnose(history({**AHEAD, **values}, keys, steps))
    return finding


def assignments(finding: Finding) -> list[str]:
    return [change.assignment for change in finding.changes]


@pytest.mark.parametrize("steps", [1, 5, 12, 20, 200])
@pytest.mark.parametrize(("values", "keys"), [(AHEAD, SEPARATE), (IN_TURN, COLOCATED)], ids=["separate", "colocated"])
def test_nothing_is_wrong_with_a_healthy_run(values: Values, keys: Mapping[str, Any], steps: int) -> None:
    """KL to the versions that sampled the answers is 0.0125 with two updates between, which the engine does not cause.
    On the same workers, generation is no waiting."""
    found = history(values, keys, steps)
    assert kinds(found) == []
    live = LiveDiagnosis(found.config)
    assert [finding for record in found.metrics for finding in live.check(int(record["step"]), record)] == []


@pytest.mark.parametrize("kind", ["staleness_hurts", "queue_grows", "starving_trainer"])
def test_a_running_run_warns_of_it(kind: str) -> None:
    found = FAULTY[kind]()
    live = LiveDiagnosis(found.config)
    warned = [finding.kind for record in found.metrics for finding in live.check(int(record["step"]), record)]
    assert warned == [kind]


@pytest.mark.parametrize(
    ("name", "new", "old"),
    [
        (K3, 0.001, 0.3),
        ("rollout_corr/rollout_is_ratio_fraction_high", 0.0, 0.1),
        ("rollout_corr/rollout_rs_masked_fraction", 0.02, 0.4),
    ],
)
def test_old_answers_hurt_if_their_weights_are_worse_than_those_of_new_ones(name: str, new: float, old: float) -> None:
    finding = only({name: lambda step: new if step == 1 else old})
    assert finding.kind == "staleness_hurts" and finding.certain
    assert finding.evidence[0].startswith(f"{name}: {old:g} with answers that are 2 versions old")
    assert assignments(finding) == ["trainer.v1.sampler.max_off_policy_threshold=1", f"{BATCHES}=0"]


def test_weights_of_whole_answers_are_replaced_by_those_of_tokens() -> None:
    keys = {**SEPARATE, "algorithm.rollout_correction.rollout_is": "sequence"}
    assert assignments(only({K3: lambda step: 0.001 if step == 1 else 0.3}, keys))[-1].endswith("rollout_is=token")


def test_what_new_answers_measure_as_well_does_not_come_from_their_age() -> None:
    """The rejection of a synchronous run, and an engine that differs: of this, only the first step can tell."""
    assert kinds(history({**AHEAD, "rollout_corr/rollout_rs_masked_fraction": 0.4}, SEPARATE)) == []
    assert kinds(history({**AHEAD, K3: 0.3}, SEPARATE)) == []
    fresh = {f"{WORST}/{name}": 0.0 for name in ("mean", "max")}
    assert kinds(history({**AHEAD, K3: 0.3, **fresh}, SEPARATE)) == ["rollout_mismatch"]


def test_a_reward_that_falls_while_answers_are_as_old_as_they_may_be() -> None:
    values: Values = {"critic/score/mean": lambda step: 0.6 - 0.02 * step, f"{WORST}/max": 8.0}
    by_kind = {finding.kind: finding for finding in diagnose(history({**AHEAD, **values}, SEPARATE))}
    assert not by_kind["staleness_hurts"].certain
    assert assignments(by_kind["staleness_hurts"])[0] == "trainer.v1.sampler.max_off_policy_threshold=4"
    younger = diagnose(history({**AHEAD, **values, f"{WORST}/max": 3.0}, SEPARATE))
    assert "staleness_hurts" not in [finding.kind for finding in younger]


def test_a_trainer_that_waits_for_generation_needs_more_of_it() -> None:
    finding = only({WAIT: 6.0, "timing_s/gen": 5.9, IDLE: 0.1})
    assert (finding.kind, finding.severity, finding.certain) == ("starving_trainer", Severity.NOTE, True)
    assert finding.causes == ("generation is slower than training",)
    assert finding.evidence[0] == "training/wait_s: 60% of the time, and more than 40% of 18 of 18 steps"
    assert assignments(finding) == ["trainer.pools.rollout=3", f"{BATCHES}=2"]
    two = {**SEPARATE, "trainer.pools.rollout": 1, "trainer.n_gpus_per_node": 2}
    assert assignments(only({WAIT: 6.0, IDLE: 0.1}, two)) == [f"{BATCHES}=2"]


def test_a_trainer_that_waits_while_the_engines_are_idle_waits_for_scores() -> None:
    finding = only({WAIT: 6.0, "timing_s/gen": 5.9, IDLE: 5.0})
    assert finding.causes == ("scores are late: the reward function or the judge is slow",)
    assert assignments(finding) == ["reward_model.num_workers=32", f"{BATCHES}=2"]
    shared = only({**IN_TURN, "timing_s/reward": 5.0}, COLOCATED)
    assert shared.causes == finding.causes and shared.evidence[0].startswith("timing_s/reward: 50% of the time")
    assert assignments(shared)[-1] == "trainer.v1.colocate_async.num_warmup_batches=2"


def test_waiting_that_is_rare_or_short_is_healthy() -> None:
    """Of 10 s a step: 2.2 s on average; 3.9 s in each step; 9 s in two steps of five, which is 3.8 s on average."""
    healthy = (lambda step: 7.0 if step % 5 == 0 else 1.0, 3.9, lambda step: 9.0 if step % 5 < 2 else 0.3)
    for waits in healthy:
        assert kinds(history({**AHEAD, WAIT: waits}, SEPARATE)) == []
    assert only({WAIT: lambda step: 10.0 if step % 5 < 2 else 0.3}).evidence[0].endswith("7 of 18 steps")


def test_groups_that_are_dropped_again_and_again() -> None:
    finding = only({DROPPED: 6.0})
    assert (finding.kind, finding.severity) == ("queue_grows", Severity.WARNING)
    assert finding.evidence[0] == f"{DROPPED}: 6 of 64 a step, in 6 of the last 6 steps"
    bound, strategy, batches = assignments(finding)
    assert (bound, strategy) == (
        "trainer.v1.sampler.max_off_policy_threshold=16",
        "trainer.v1.sampler.max_off_policy_strategy=wait",
    )
    assert batches == f"{BATCHES}=0"
    late = only({DROPPED: 6.0, CARRIED: 0.0})
    assert late.causes == ("scores are so late that groups become too old",)
    assert kinds(history({**AHEAD, DROPPED: lambda step: 6.0 * (step % 10 == 0)}, SEPARATE, 40)) == []


def test_answers_begun_ahead_that_become_more_are_a_note() -> None:
    """The queue has 64 × 8 answers a step; one that fills and then stays full is healthy."""
    finding = only({CARRIED: lambda step: 20.0 * step})
    assert (finding.kind, finding.severity) == ("queue_grows", Severity.NOTE)
    assert assignments(finding) == [f"{BATCHES}=0"]
    for few in (lambda step: 2.0 * step, lambda step: min(300.0, 100.0 * step)):
        assert kinds(history({**AHEAD, CARRIED: few}, SEPARATE)) == []
