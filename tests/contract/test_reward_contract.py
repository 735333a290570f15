"""What every Reward owes its callers, whatever is behind it."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rloom.rewards.base import Reward
from rloom.rewards.function_reward import FunctionReward
from rloom.rewards.pool import RulePool
from rloom.types import Sample, Score

# Raises for some, is right for some, wrong for others: the same outcomes as the rule behind math_reasoning.
CUSTOM = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if not ground_truth:
        raise ValueError("empty")
    return {"score": float(solution_str == ground_truth), "pred": solution_str}
"""


def by_rule(folder) -> Reward:
    return RulePool(num_workers=2, timeout_s=60)


def by_custom_function(folder) -> Reward:
    (folder / "custom.py").write_text(CUSTOM)
    return RulePool(num_workers=2, timeout_s=60, path=str(folder / "custom.py"))


def by_given_function(folder) -> Reward:
    space: dict[str, Any] = {}
    exec(CUSTOM, space)
    return FunctionReward(
        space["compute_score"], concurrent_calls=2, timeout_s=60, reward_kwargs={}, whole_groups=False
    )


@pytest.fixture(params=[by_rule, by_custom_function, by_given_function], scope="module")
def build(request, tmp_path_factory) -> Callable[[], Reward]:
    return lambda: request.param(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def reward(build) -> Iterator[Reward]:
    reward = build()
    yield reward
    reward.close()


def row(response: str, truth: str = "42") -> Sample:
    return Sample("math_reasoning", "15 + 27?", response, truth, {"index": 0})


def score(reward: Reward, samples: list[Sample]) -> list[Score]:
    return [one for [one] in asyncio.run(reward.score([(sample,) for sample in samples]))]


def test_no_samples_give_no_scores(reward):
    assert score(reward, []) == []


def test_scores_come_in_the_order_of_the_samples(reward):
    samples = [row(str(i), str(i - i % 2)) for i in range(40)]
    scores = score(reward, samples)
    assert [one.value for one in scores] == [1.0, 0.0] * 20
    assert [one.prediction for one in scores] == [str(i) for i in range(40)]


def test_the_same_sample_gets_the_same_score(reward):
    assert score(reward, [row("42")]) == score(reward, [row("42")])


def test_a_wrong_answer_is_a_zero_and_not_a_failure(reward):
    [wrong] = score(reward, [row("41")])
    assert wrong.ok and wrong.value == 0.0


def test_one_bad_sample_fails_with_its_reason_and_spares_the_others(reward):
    scores = score(reward, [row("42"), row("42", truth=""), row("42")])
    assert [one.value for one in scores] == [1.0, None, 1.0]
    assert scores[1].reason is not None and "empty" in scores[1].reason


def test_calls_may_overlap_in_one_event_loop(reward):
    async def several() -> list[list[list[Score]]]:
        return await asyncio.gather(*(reward.score([(row(str(i)),)]) for i in range(40, 45)))

    assert [one.value for [[one]] in asyncio.run(several())] == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_cancelled_call_leaves_the_reward_usable(reward):
    async def give_up(after_s: float) -> bool:
        """Whether it was cancelled."""
        scoring = asyncio.create_task(reward.score([(row("42"),)] * 200))
        await asyncio.sleep(after_s)
        scoring.cancel()
        await asyncio.wait([scoring])
        return scoring.cancelled()

    assert asyncio.run(give_up(0))  # in the next turn of the event loop, when no score can have arrived
    asyncio.run(give_up(0.001))  # while it is computed; a machine that pauses here may have all scores
    assert score(reward, [row("42")])[0].value == 1.0


def test_closing_is_allowed_before_use_and_again_after_it(build):
    unused = build()
    unused.close()
    used = build()
    assert score(used, [row("42")])[0].value == 1.0
    used.close()
    used.close()
