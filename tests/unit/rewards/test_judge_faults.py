"""Many samples through a provider that fails often: each is scored right or failed with a reason, and no key shows."""

import asyncio
import contextlib
import logging
import random
from pathlib import Path

import pytest

from rloom.rewards.judge.api import ChatRequest, JudgeApi, JudgeCallFailed
from rloom.rewards.judge.settings import Secret
from rloom.types import Score
from tests.judge_server import KEY, JudgeServer, faults_by_share, no_faults, serving
from tests.judging import TYPES, judge_for, scores_of, worth

FAULTS = {"429": 0.1, "429 date": 0.05, "500": 0.15, "hang": 0.05, "malformed": 0.05, "cut": 0.01}  # 41 % of answers
SAMPLES = 40


def command_lines() -> bytes:
    found = b""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended, or is of another user
            found += file.read_bytes()
    return found


def judged(type: str, samples: int, folder: Path, *, timeout_s: float, retries: int) -> list[Score]:
    """Scores of a fresh run, after a check that each one is right or has a reason."""
    drawn = [random.Random(number).randint(1, 10) for number in range(samples)]
    groups = [(worth(score, prompt=f"Question {number}"),) for number, score in enumerate(drawn)]
    with serving(plan=faults_by_share(FAULTS, seed=len(type))) as server:
        reward = judge_for(
            server, type, concurrency=16, timeout_s=timeout_s, max_retries=retries, cache_dir=str(folder)
        )
        found = [score for group in scores_of(reward, groups) for score in group]
        assert KEY.encode() not in command_lines()
    for score, expected in zip(found, drawn, strict=True):
        assert score.reason if score.value is None else score.value == pytest.approx((expected - 1) / 9)
    metrics = reward.metrics()
    failed = sum(score.value is None for score in found)
    # a connection may end before the server has read the request
    assert metrics["failed"] == failed and metrics["requests"] >= len(server.received)
    assert metrics["retries"] == metrics["requests"] - samples > 0.3 * samples
    print({name: round(value, 4) for name, value in metrics.items()}, f"at most {server.most_at_once} at once")
    return found


def assert_no_key(scores: list[Score], folder: Path, log: str) -> None:
    assert KEY not in repr(scores) and KEY not in log
    assert not any(KEY.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("type", TYPES)
def test_every_sample_is_scored_right_or_failed_with_a_reason(
    type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        found = judged(type, SAMPLES, tmp_path, timeout_s=3, retries=2)
    # 0.41³ of the samples fail three times: 7 %, and more where a busy machine exceeds the time limit
    assert 0.5 * SAMPLES < sum(score.ok for score in found) < SAMPLES
    assert_no_key(found, tmp_path, caplog.text)


def test_calls_that_were_ended_by_their_time_limit_leave_connections_for_others() -> None:
    """A pool that loses the connections of cancelled requests is exhausted after two of them."""
    request = ChatRequest("m", "s", "[worth 3]", 0.0, 9, None)

    async def run(server: JudgeServer) -> int:
        api, slots = JudgeApi("openai", server.base_url("openai"), Secret(KEY), {}, 2), asyncio.Semaphore(2)

        async def call(limit_s: float) -> bool:
            async with slots:
                try:
                    return bool(await asyncio.wait_for(api.complete(request), limit_s))
                except (TimeoutError, JudgeCallFailed):
                    return False

        drawn = random.Random(0)
        await asyncio.gather(*(call(drawn.choice((0.01, 0.02, 0.05))) for _ in range(300)))
        server.plan = no_faults
        found = await asyncio.gather(*(call(60) for _ in range(4)))
        await api.close()
        return sum(found)

    with serving(plan=faults_by_share({"hang": 0.2, "cut": 0.05, "500": 0.1}), latency_s=0.01) as server:
        assert asyncio.run(run(server)) == 4


@pytest.mark.long
def test_with_five_retries_nearly_all_of_200_samples_are_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        found = judged("openai", 200, tmp_path, timeout_s=4, retries=5)
    # 0.41⁶ fail six times: 0.5 %
    assert sum(score.ok for score in found) > 0.9 * 200
    assert_no_key(found, tmp_path, caplog.text)
