"""Learning rates worked out by hand."""

import math

import pytest

from rloom.training.learning_rate import LearningRateSchedule


def rates(schedule: LearningRateSchedule, steps: int) -> list[float]:
    return [schedule.at(step) for step in range(1, steps + 1)]


def test_constant_is_constant_however_long_the_run() -> None:
    assert rates(LearningRateSchedule(0.5, total_steps=2), 4) == [0.5, 0.5, 0.5, 0.5]


def test_the_warm_up_rises_in_equal_steps_and_ends_at_the_peak() -> None:
    assert rates(LearningRateSchedule(1.0, warmup_steps=4, total_steps=6), 6) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    )


def test_a_warm_up_of_one_step_is_none() -> None:
    assert rates(LearningRateSchedule(1.0, warmup_steps=1, total_steps=3), 3) == [1.0, 1.0, 1.0]


def test_linear_would_reach_zero_after_the_last_step_which_still_learns() -> None:
    assert rates(LearningRateSchedule(2.0, total_steps=5, kind="linear"), 6) == pytest.approx(
        [2.0, 1.6, 1.2, 0.8, 0.4, 0.0]
    )


def test_linear_falls_to_its_floor() -> None:
    falling = LearningRateSchedule(2.0, total_steps=4, kind="linear", floor=0.2)
    assert rates(falling, 5) == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])


def test_after_the_warm_up_linear_falls_from_the_peak() -> None:
    rising = LearningRateSchedule(1.0, warmup_steps=2, total_steps=5, kind="linear")
    assert rates(rising, 6) == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_is_slow_at_both_ends_and_half_way_in_the_middle() -> None:
    quarter = 0.5 * (1 + math.cos(math.pi / 4))  # 0.853...
    falling = LearningRateSchedule(1.0, total_steps=4, kind="cosine")
    assert rates(falling, 5) == pytest.approx([1.0, quarter, 0.5, 1 - quarter, 0.0])


def test_cosine_with_warm_up_and_floor() -> None:
    rising = LearningRateSchedule(10.0, warmup_steps=2, total_steps=3, kind="cosine", floor=0.1)
    assert rates(rising, 4) == pytest.approx([5.0, 10.0, 5.5, 1.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_past_its_end_a_schedule_stays_at_the_floor(kind: str) -> None:
    assert LearningRateSchedule(1.0, total_steps=4, kind=kind, floor=0.3).at(9) == pytest.approx(0.3)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_takes_it_at_the_peak(kind: str) -> None:
    assert LearningRateSchedule(1.0, total_steps=1, kind=kind).at(1) == 1.0


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_only_rises(kind: str) -> None:
    assert rates(LearningRateSchedule(1.0, warmup_steps=3, total_steps=3, kind=kind), 3) == pytest.approx(
        [1 / 3, 2 / 3, 1.0]
    )
