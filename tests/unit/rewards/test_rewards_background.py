"""Scoring beside the main thread, and stopping a run whose rewards fail."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch

from rloom.config.load import load_config
from rloom.episodes.episode import Episode, Node
from rloom.episodes.record import Ending, EpisodeRecord, episode_trajectories
from rloom.episodes.template import RenderedConversation
from rloom.errors import RewardError, TrainingError
from rloom.launch.rewards import open_queues
from rloom.rewards.base import ScoringUnit
from rloom.rewards.composite import check_failures
from rloom.rewards.pool import RulePool
from rloom.rewards.score_queue import BackgroundScorer, LeastLoaded
from rloom.types import Prompt, Sample, SampleGroup, Score
from tests.waiting import wait_until


class LengthReward:
    """The length of the response; waits for `gate` where there is one."""

    unit = ScoringUnit.ANSWER

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.closed = 0

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        while self.gate is not None and not self.gate.is_set():
            await asyncio.sleep(0.005)
        return [[Score(len(sample.response)) for sample in group] for group in groups]

    def check(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.closed += 1


def sample(response: str) -> list[SampleGroup]:
    return [(Sample("s", "p", response),)]


def test_samples_are_scored_while_the_main_thread_goes_on():
    gate = threading.Event()
    scorer = BackgroundScorer(LengthReward(gate))
    futures = [scorer.submit(sample("x" * length)) for length in (3, 1, 2)]
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.result(timeout=60) for future in futures] == [[[Score(3)]], [[Score(1)]], [[Score(2)]]]
    scorer.close()


def test_closing_cancels_what_is_unfinished_and_closes_the_reward_once():
    reward = LengthReward(threading.Event())
    scorer = BackgroundScorer(reward)
    future = scorer.submit(sample("x"))
    scorer.close()
    scorer.close()
    assert future.cancelled() and reward.closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        scorer.submit(sample("x"))


def test_an_error_inside_the_reward_reaches_whoever_asks_for_the_score():
    class Broken(LengthReward):
        async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
            raise KeyError("a bug")

    scorer = BackgroundScorer(Broken())
    with pytest.raises(KeyError, match="a bug"):
        scorer.submit(sample("x")).result(timeout=60)
    scorer.close()


def test_a_pool_behind_it_scores_and_closes_without_a_trace():
    before = set(threading.enumerate())
    scorer = BackgroundScorer(RulePool(num_workers=2, timeout_s=60))
    futures = [scorer.submit([(Sample("math_reasoning", "p", f"答案：{i}", "7"),)]) for i in range(20)]
    assert [future.result(timeout=60)[0][0].value for future in futures] == [float(i == 7) for i in range(20)]
    scorer.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_closing_does_not_wait_for_a_hanging_function(tmp_path):
    """Had it waited, the first sample would have a score instead: a failure after the 30 s."""
    file, begun = tmp_path / "slow.py", tmp_path / "begun"
    file.write_text(
        "import pathlib, time\n"
        f"def compute_score(**row):\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(60)\n"
    )
    scorer = BackgroundScorer(RulePool(num_workers=1, timeout_s=30, path=str(file)))
    futures = [scorer.submit(sample("x")) for _ in range(3)]
    while not begun.exists():
        assert not futures[0].done(), futures[0].result()
        time.sleep(0.01)
    scorer.close()
    assert all(future.cancelled() for future in futures)


BLOCKING_KIND = """
import pathlib, time
from rloom.rewards.base import ScoringUnit
from rloom.rewards.kinds import RewardKind
from rloom.types import Score


class Blocking:
    unit = ScoringUnit.ANSWER

    async def score(self, groups):
        until_s = time.monotonic() + 60
        while not pathlib.Path(__file__ + ".gate").exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        return [[Score(float(time.monotonic() < until_s))] for group in groups]

    def check(self): ...

    def metrics(self):
        return {}

    def close(self): ...


KIND = RewardKind(parts=("own_score",), build=lambda config: Blocking())
"""


def test_a_users_kind_that_blocks_its_event_loop_delays_no_other_reward(tmp_path):
    file = tmp_path / "blocking_kind.py"
    file.write_text(BLOCKING_KIND)
    config = load_config(
        [
            f"reward_model.kinds=['{file}:KIND']",
            "reward_model.composite.enable=True",
            "+reward_model.composite.weights.rule_score=0.5",
            "+reward_model.composite.weights.own_score=0.5",
        ]
    )
    answer = [(Sample("math_reasoning", "p", "答案：7", "7"),)]
    with open_queues(config, []) as queues:
        own = queues["own_score"].submit(answer)
        [[by_rule]] = queues["rule_score"].submit(answer).result(timeout=90)
        (tmp_path / "blocking_kind.py.gate").touch()
        assert by_rule.value == 1 and own.result(timeout=90) == [[Score(1)]]


class Manual:
    """A queue whose scores are set by the test: the number of the queue."""

    unit = ScoringUnit.ANSWER

    def __init__(self, number: int) -> None:
        self.number = number
        self.waiting: list[tuple[Future[list[list[Score]]], Sequence[SampleGroup]]] = []

    def submit(self, groups: Sequence[SampleGroup]) -> "Future[list[list[Score]]]":
        self.waiting.append((Future(), groups))
        return self.waiting[-1][0]

    def metrics(self) -> dict[str, float]:
        return {"number": float(self.number)}

    def finish(self) -> None:
        for future, groups in self.waiting:
            future.set_result([[Score(self.number)] * len(group) for group in groups])
        self.waiting = []


def test_samples_go_to_the_machine_with_the_fewest_unfinished_ones_and_come_back_in_order():
    queues = [Manual(0), Manual(1)]
    balanced = LeastLoaded(queues[0], queues)
    one, pair = sample("x")[0], (Sample("s", "p", "a"), Sample("s", "p", "b"))
    first = balanced.submit([one, pair, one, one])  # 0: one, one; 1: pair; then 0 and 1 have two each: 0
    assert [len(queue.waiting[0][1]) for queue in queues] == [3, 1]
    queues[0].finish()
    second = balanced.submit([one, one, one])  # 0 has none left, 1 has two: 0, 0, then 0 (two each)
    assert [len(groups) for _, groups in queues[0].waiting] == [3] and len(queues[1].waiting) == 1
    queues[0].finish()
    queues[1].finish()
    assert [[score.value for score in scores] for scores in first.result()] == [[0], [1, 1], [0], [0]]
    assert [scores[0].value for scores in second.result()] == [0, 0, 0]
    assert balanced.metrics() == {"number": 0.0} and balanced.unit is ScoringUnit.ANSWER


def test_few_failures_are_tolerated():
    check_failures([], 0.0)
    check_failures([Score(0), Score(1)], 0.0)
    check_failures([Score(1), Score.failed("a"), Score(1), Score(0)], 0.25)


def test_too_many_failures_stop_the_run_with_the_reasons_counted():
    scores = [
        Score(1),
        Score.failed("timed out after 10 s (data_source='a', a response of 4 characters)"),
        Score.failed("timed out after 10 s (data_source='b', a response of 977 characters)"),
        Score.failed("KeyError: 'index' (my_rewards.py:3 in compute_score)"),
    ]
    with pytest.raises(RewardError) as caught:
        check_failures(scores, 0.5)
    assert str(caught.value) == (
        "3 of 4 rewards failed (75.0%), more than reward_model.max_failed_share=0.5 allows. "
        "Most common, each with one example:\n"
        "  2 × timed out after 10 s (data_source='a', a response of 4 characters)\n"
        "  1 × KeyError: 'index' (my_rewards.py:3 in compute_score)\n"
        "Mend the reward function or the rows it fails on, or allow a larger share."
    )


def test_failures_of_environments_are_not_called_those_of_the_reward():
    record = EpisodeRecord(Episode(), Ending.FAILED, failure="KeyError: 'x' (env.py:4 in Game.step)")
    record.episode.add(Node(None, (), torch.tensor([1]), RenderedConversation((), (), "")))
    prompt = Prompt(0, (), "", (), "game")
    [trajectory] = episode_trajectories(record, prompt, 0, Score(1.0))
    with pytest.raises(TrainingError, match="Correct the environment, the tools or the agent") as caught:
        check_failures([trajectory.score, trajectory.score, Score.failed("timed out")], 0.5)
    assert "  2 × the environment failed: KeyError: 'x' (env.py:4 in Game.step)" in str(caught.value)


def test_only_the_most_common_reasons_are_listed():
    kinds = "abcdefg"
    scores = [Score.failed(f"reason {kind}") for kind in kinds for _ in range(9 - kinds.index(kind))]
    with pytest.raises(RewardError) as caught:
        check_failures(scores, 0.1)
    lines = str(caught.value).splitlines()
    assert lines[1] == "  9 × reason a" and lines[5] == "  5 × reason e" and lines[6] == "  and 2 other reasons"
