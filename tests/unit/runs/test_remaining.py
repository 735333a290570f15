"""The time that a run will still take, with numbers by hand."""

import pytest

from rloom.runs.remaining import SAVE, STEP, VALIDATION, RemainingTime, Schedule, clock_time


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Run(RemainingTime):
    """A run of 10 steps with a clock in the hand: validation every 4 steps and at the end, a checkpoint every 5."""

    def __init__(self) -> None:
        self.hand = Clock()
        super().__init__(Schedule(total_steps=10, validate_every=4, save_every=5), self.hand)

    def spend(self, part: str, seconds: float) -> None:
        self.begin(part)
        self.hand.now += seconds
        self.end(part)

    def take(self, step: int, seconds: float) -> None:
        self.begin_step(step)
        self.hand.now += seconds
        self.complete_step()


@pytest.mark.parametrize(
    ("part", "after", "left"),
    [
        (STEP, 0, 10), (STEP, 9, 1), (STEP, 10, 0),
        (VALIDATION, 0, 3), (VALIDATION, 3, 3), (VALIDATION, 4, 2), (VALIDATION, 8, 1), (VALIDATION, 10, 0),
        (SAVE, 0, 2), (SAVE, 5, 1), (SAVE, 10, 0),
    ],
)  # fmt: skip
def test_what_is_left_of_ten_steps(part: str, after: int, left: int) -> None:
    """Validations at 4, 8 and 10; checkpoints at 5 and 10."""
    assert Schedule(10, validate_every=4, save_every=5).left(part, after) == left


def test_the_last_step_is_always_saved_and_no_validation_means_none() -> None:
    schedule = Schedule(10)
    assert [schedule.left(part, 3) for part in (STEP, VALIDATION, SAVE)] == [7, 0, 1]


def test_nothing_is_known_before_the_first_step() -> None:
    run = Run()
    run.spend(VALIDATION, 30.0)
    run.take(1, 20.0)
    assert run.left_s() is None


def test_steps_validations_and_checkpoints_are_counted() -> None:
    run = Run()
    run.spend(VALIDATION, 30.0)  # before the first step
    run.take(1, 100.0)
    run.take(2, 60.0)
    run.take(3, 60.0)
    # measured: 100, 60 (the third ends with the next); the first has allocated and compiled
    assert run.left_s() == 7 * 60 + 3 * 30  # no checkpoint was measured yet
    run.take(4, 60.0)
    assert run.left_s() == 6 * 60 + 3 * 30  # its validation is still to come
    run.begin(VALIDATION)
    run.hand.now += 10.0
    assert run.left_s() == 6 * 60 + 3 * 30 - 10
    run.hand.now += 20.0
    run.end(VALIDATION)
    assert run.left_s() == 6 * 60 + 2 * 30
    run.take(5, 60.0)
    run.spend(SAVE, 8.0)
    run.begin_step(6)
    assert run.seconds[STEP] == [100.0, 60.0, 60.0, 60.0, 60.0]  # without validation and checkpoint
    assert run.left_s() == 5 * 60 + 2 * 30 + 1 * 8


def test_the_time_of_the_step_under_way_counts_down_and_not_below_the_others() -> None:
    run = Run()
    run.take(1, 60.0)
    run.begin_step(2)
    for waited, left in ((0.0, 9 * 60), (45.0, 9 * 60 - 45), (100.0, 8 * 60)):
        run.hand.now += waited
        assert run.left_s() == left


def test_a_resumed_run_counts_from_its_step_and_uses_its_own_times_as_soon_as_there_are_any() -> None:
    run = Run()
    before = [{"step": 5.0, "timing_s/step": 40.0, "timing_s/testing": 12.0}, {"step": 6.0, "timing_s/step": 20.0}]
    run.add_history(before, last_step=6)
    assert run.left_s() == 4 * 30 + 2 * 12  # no checkpoint was measured
    run.take(7, 10.0)
    assert run.left_s() == 3 * 30 + 2 * 12
    run.begin_step(8)
    assert run.left_s() == 3 * 10 + 2 * 12


def test_a_run_that_has_ended_has_nothing_left() -> None:
    run = Run()
    run.take(9, 60.0)
    run.take(10, 60.0)
    run.spend(VALIDATION, 5.0)
    run.spend(SAVE, 5.0)
    assert run.left_s() == 0


def test_a_clock_time() -> None:
    assert [clock_time(seconds) for seconds in (0.4, 61, 3599.6, 90_061)] == ["0:00", "1:01", "1:00:00", "25:01:01"]


def test_a_part_that_ends_while_the_time_is_asked_for() -> None:
    class Ended(dict[str, float]):
        def __contains__(self, part: object) -> bool:
            return True

    remaining = RemainingTime(Schedule(4), lambda: 0.0)
    remaining.add_history([{"timing_s/step": 10.0}], 1)
    remaining.step, remaining._begun = 2, Ended()
    assert remaining.left_s() == 30.0
