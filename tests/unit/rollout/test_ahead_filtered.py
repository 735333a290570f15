"""Dynamic sampling with generation ahead of training, with the engine and the queue of test_ahead.py."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rloom.errors import TrainingError
from rloom.rewards.base import ScoringUnit
from rloom.rewards.composite import CompositeReward
from rloom.training.ahead import AheadSettings
from rloom.training.queue_file import QueueReader, write_queue
from rloom.training.sampling import ROUNDS, SURPLUS, DynamicSampling, draw_seed
from rloom.types import SampleGroup, Score
from tests.unit.rollout.test_ahead import PROMPTS, STEPS, Late, N, Run, wait
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("time_limit")


class Equal(Late):
    """The answers to some prompts have equal scores, those to the others 0 and 1."""

    unit = ScoringUnit.PROMPT

    def __init__(self, equal: Sequence[int], late: Sequence[int] = ()) -> None:
        super().__init__(late)
        self.equal, self.scored = equal, 0

    def score(self, scores: "Future[list[list[Score]]]", groups: Sequence[SampleGroup]) -> None:
        [group] = groups
        self.scored += 1
        scores.set_result([[Score(float(group[0].ground_truth not in self.equal and i == 0)) for i in range(2)]])


def filtered(
    lengths: Mapping[int, int], settings: AheadSettings, equal: Sequence[int], rounds: int = 9, late: Sequence[int] = ()
) -> Run:
    return Run(lengths, settings, Equal(equal, late), dynamic=DynamicSampling(N, rounds))


def test_a_group_of_equal_scores_is_replaced_by_one_of_another_prompt() -> None:
    """Of prompts 0 to 3 in two batches, 1 is always solved. All have one token, so that each poll completes a group."""
    with filtered({0: 1, 1: 1, 2: 1, 3: 1}, wait(), [1]) as run:
        found = [run.prompts() for _ in range(STEPS)]
        assert found == [[0, 2], [3, 0], [2, 3]] * 2
        assert run.ahead.dropped == 4 and run.ahead.admitted == N * STEPS + 4
        assert not run.ahead.groups, "nothing is begun that is not trained"


def test_a_step_counts_the_batches_whose_groups_it_has_replaced_and_stops_at_the_limit() -> None:
    with filtered({0: 1, 1: 1, 2: 1, 3: 1}, wait(), [0, 1, 2]) as run:
        assert run.prompts() == [3, 3], "six of eight groups are replaced: four batches"
        assert (run.metrics[ROUNDS], run.metrics[SURPLUS]) == (4.0, 0.0)
    limited = filtered({0: 1, 1: 1, 2: 1, 3: 1}, wait(), [0, 1, 2], rounds=3)
    with pytest.raises(TrainingError, match=r"max_num_gen_batches=3: .* only 1 of 2 groups"), limited as run:
        run.step()
    assert limited.ahead.removed_groups == 5


def test_without_staleness_dynamic_sampling_takes_what_a_synchronous_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole batches, with its seeds. What is left over is dropped: in step 1 nothing, in step 2 one group."""
    lengths, equal, counted = {0: 3, 1: 1, 2: 1, 3: 7}, [0, 1], list[int]()
    monkeypatch.setattr(CompositeReward, "update", lambda reward, rows: counted.append(len(rows)))
    for settings in (wait(batches=0, staleness=0), replace(wait(batches=0, staleness=0), drop=True)):
        with filtered(lengths, settings, equal) as run:
            assert run.prompts() == [2, 3] and (run.metrics[ROUNDS], run.metrics[SURPLUS]) == (2.0, 0.0)
            run.reward.equal = [1]
            assert run.prompts() == [0, 2] and (run.metrics[ROUNDS], run.metrics[SURPLUS]) == (2.0, 1.0)
            assert not run.ahead.groups and run.ahead.dropped == 2 + 2
        scopes = ["train/1/1", "train/1/2", "train/2/1", "train/2/2"]
        seeds = [draw_seed(1, scope, row) for scope in scopes for row in range(4)]
        assert [request.seed for request in run.engine.requests] == seeds
        assert run.reward.scored == 8
        assert counted == [2] * 4, "the running mean counts those that are not trained, too"
        counted.clear()


def test_scores_that_are_late_decide_whether_further_prompts_are_taken() -> None:
    """Nothing is left to generate when they arrive."""
    run = filtered({0: 1, 1: 1, 2: 1, 3: 1}, wait(batches=0, staleness=0), [0], late=[0])
    with run:
        waits = threading.Thread(target=lambda: found.append(run.prompts()))
        found: list[list[int]] = []
        waits.start()
        wait_until(lambda: bool(run.reward.waiting) and not run.engine.running)
        assert len(run.engine.requests) == 4
        run.reward.arrive()
        waits.join(timeout=60)
    assert found == [[1, 2]] and len(run.engine.requests) == 8


@examples(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    equal=st.sets(st.integers(0, 3), max_size=3),
    batches=st.integers(0, 2),
    staleness=st.integers(0, 3),
    drop=st.booleans(),
)
def test_with_dynamic_sampling_every_step_has_its_groups_within_the_bound(
    lengths: list[int], equal: set[int], batches: int, staleness: int, drop: bool
) -> None:
    ahead = AheadSettings(N, batches, staleness, drop)
    with filtered(dict(enumerate(lengths)), ahead, [*equal], rounds=99) as run:
        for _ in range(STEPS):
            found = run.prompts()
            assert len(found) == N and not equal & {*found}
            assert run.metrics["training/off_policy/trajectory_staleness_worst/max"] <= staleness
        assert run.ahead.admitted - run.ahead.dropped - N * STEPS == len(run.ahead.groups) < 2 * N


def test_a_checkpoint_counts_the_groups_that_were_replaced(tmp_path: Path) -> None:
    lengths = {0: 5, 1: 2, 2: 2, 3: 2}
    with filtered(lengths, wait(), [2]) as run:
        expected = [run.prompts() for _ in range(STEPS)]
    with filtered(lengths, wait(), [2]) as run:
        for _ in range(2):
            run.step()
        write_queue(tmp_path, run.ahead.queue)
        position = run.stream.state()
        assert run.ahead.dropped > 0
    with filtered(lengths, wait(), [2]) as run:
        run.stream.load(position)
        saved = QueueReader(PROMPTS, 2).read(tmp_path)
        assert saved is not None
        run.ahead.load(saved, 2)
        run.steps = run.engine.version = 2
        assert [run.prompts() for _ in range(2, STEPS)] == expected[2:]
