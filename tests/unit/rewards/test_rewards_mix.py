"""The weighted sum of several rewards, their running moments, and what a failed part does."""

import math
from typing import Any

import pytest

from rloom.errors import CheckpointError
from rloom.rewards.composite import CompositeReward, MixedPart, Moments
from rloom.types import Score


def mix(**options: dict[str, Any]) -> CompositeReward:
    weights = {"rm_score": 0.7, "rule_score": 0.3}
    queue: Any = None  # nothing is submitted here
    return CompositeReward(
        [MixedPart(name, queue, weight, **options.get(name, {})) for name, weight in weights.items()]
    )


def test_the_score_is_the_weighted_sum_and_its_parts_are_named():
    found = mix().combine([Score(2.0), Score(1.0, parts={"acc": 1.0, "length": 7.0}, prediction="42")])
    assert found.value == pytest.approx(0.7 * 2.0 + 0.3 * 1.0)
    assert found.parts == {"rm_score": 2.0, "rule_score": 1.0, "acc": 1.0, "rule_score/length": 7.0}
    assert found.accuracy == 1.0 and found.prediction == "42"  # validation reports the rule's accuracy


def test_one_part_alone_is_unchanged():
    queue: Any = None
    score = Score(0.5, parts={"acc": 1.0}, prediction="x")
    assert CompositeReward([MixedPart("rule_score", queue)]).combine([score]) is score


def test_a_failed_part_fails_the_sample_with_its_name():
    found = mix().combine([Score.failed("timed out"), Score(1.0)])
    assert not found.ok and found.reason == "rm_score: timed out"


def test_a_part_whose_failure_is_skipped_gives_its_weight_to_the_others():
    tolerant = mix(rm_score={"skip_failed": True})
    found = tolerant.combine([Score.failed("timed out"), Score(1.0)])
    assert found.value == pytest.approx(0.3 * 1.0 * (0.7 + 0.3) / 0.3)  # as if the rule had all the weight
    assert found.parts == {"rule_score": 1.0, "rm_score/skipped": 1.0}
    assert tolerant.combine([Score(2.0), Score(1.0)]).parts["rm_score/skipped"] == 0.0
    assert tolerant.combine([Score.failed("timed out"), Score.failed("KeyError")]).reason == "rule_score: KeyError"


def signed(**weights: float) -> CompositeReward:
    queue: Any = None  # nothing is submitted here
    return CompositeReward([MixedPart(name, queue, weight, skip_failed=True) for name, weight in weights.items()])


def test_a_failed_penalty_does_not_pay():
    two = signed(reward=1.0, penalty=-0.5)
    assert two.combine([Score(1.0), Score(0.0)]).value == 1.0
    assert two.combine([Score(1.0), Score.failed("x")]).value == 1.0  # 1.5 if its weight went to the reward
    assert two.combine([Score.failed("x"), Score(1.0)]).value == -0.5  # nothing of the reward's sign is left


def test_the_weight_of_a_skipped_part_goes_to_those_of_its_sign():
    four = signed(a=1.0, b=3.0, c=-1.0, d=-2.0)
    values = [Score(2.0), Score(1.0), Score(3.0), Score(0.5)]
    assert four.combine(values).value == pytest.approx(2 + 3 - 3 - 1)
    failed = Score.failed("x")
    # a alone: 1 · 2 · (1 + 3) / 1 = 8; c and d: -3 - 1
    assert four.combine([values[0], failed, *values[2:]]).value == pytest.approx(8 - 4)
    # a and b: 2 + 3; d alone: -2 · 0.5 · (1 + 2) / 2 = -1.5
    assert four.combine([*values[:2], failed, values[3]]).value == pytest.approx(5 - 1.5)
    assert four.combine([failed, failed, *values[2:]]).value == pytest.approx(-4)
    assert four.combine([failed] * 4).reason == "a: x; b: x; c: x; d: x"


def test_a_sum_that_float32_cannot_hold_is_a_failure():
    found = signed(a=1e20, b=1.0).combine([Score(1e20), Score(1.0)])
    assert found.reason == "the weighted sum of the parts; the reward is 1e+40, which is beyond 1e+30"
    assert signed(a=1e300, b=-1e300).combine([Score(1e20)] * 2).value is None  # infinity less infinity


def test_when_every_part_fails_and_is_skipped_the_sample_fails_with_all_reasons():
    tolerant = mix(rm_score={"skip_failed": True}, rule_score={"skip_failed": True})
    found = tolerant.combine([Score.failed("timed out"), Score.failed("KeyError")])
    assert found.reason == "rm_score: timed out; rule_score: KeyError"


def test_a_normalised_part_is_centred_and_scaled_by_the_moments_of_the_run():
    normalised = mix(rm_score={"normalize": True})
    rows = [[Score(1.0), Score(0.0)], [Score(3.0), Score(1.0)], [Score.failed("x"), Score(1.0)]]
    normalised.update(rows)  # 1 and 3: mean 2, standard deviation 1; the failure does not count
    found = [normalised.combine(row) for row in rows[:2]]
    assert [score.value for score in found] == pytest.approx([0.7 * -1 + 0.0, 0.7 * 1 + 0.3])
    assert found[0].parts == pytest.approx({"rm_score": 1.0, "rm_score/normalized": -1.0, "rule_score": 0.0})
    normalised.update([[Score(5.0), Score(0.0)]] * 2)  # 1, 3, 5, 5: mean 3.5, variance (6.25 + .25 + 2.25 + 2.25) / 4
    assert normalised.moments["rm_score"].std == pytest.approx(math.sqrt(11 / 4))
    assert normalised.combine([Score(3.5), Score(0.0)]).value == pytest.approx(0.0)


def test_moments_are_saved_and_loaded_exactly():
    saved, loaded = mix(rm_score={"normalize": True}), mix(rm_score={"normalize": True})
    saved.update([[Score(value), Score(0.0)] for value in (0.1, 0.7, -3.3)])
    loaded.load(saved.state())
    assert loaded.state() == saved.state()
    loaded.load({"another_part": [1, 2, 3]})  # of a run with other parts: not used
    assert loaded.state() == saved.state()
    for damaged in ("x", [1, 2], [float("inf"), 0, 1], [2, float("nan"), 1], [2, 0.0, -1.0], [2, 1e200, 1.0]):
        with pytest.raises(CheckpointError, match=r"running moments of rm_score cannot be read \("):
            loaded.load({"rm_score": damaged})


def test_moments_of_batches_equal_those_of_all_values_at_once():
    values = [0.5, -2.0, 7.25, 7.25, 0.0, 3.5]
    apart = Moments().updated(values[:1]).updated(values[1:4]).updated([]).updated(values[4:])
    mean = sum(values) / 6
    assert apart.count == 6 and apart.mean == pytest.approx(mean)
    assert apart.std == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in values) / 6))


def test_moments_do_not_overflow():
    largest = Moments().updated([1e30, -1e30])
    assert (largest.mean, largest.std) == (0.0, pytest.approx(1e30))
    assert Moments().updated([1e200, 1.0, float("nan"), 3.0, -float("inf")]) == Moments().updated([1.0, 3.0])
    assert Moments().updated([1e200]) == Moments()


def test_equal_scores_are_only_centred_and_no_scores_change_nothing():
    assert Moments().updated([2.0, 2.0]).normalized(2.5) == 0.5
    assert Moments().normalized(2.5) == 2.5
