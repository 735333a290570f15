"""A judge for the local server, and samples whose scores are known."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from rloom.config.reward_sections import ApiJudge
from rloom.net.retry import Backoff
from rloom.rewards.judge.judge import JudgeReward
from rloom.types import Sample, SampleGroup, Score
from tests.judge_server import KEY, JudgeServer

ENVIRONMENT = {
    name: KEY for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "DASHSCOPE_API_KEY", "JUDGE_KEY")
}
TYPES = ("openai", "claude", "gemini", "dashscope")


def quick_backoff() -> Backoff:
    return Backoff(first_s=0.002, longest_s=0.02, randomness=random.Random(0))


def judge_for(server: JudgeServer, type: str = "openai", **keys: Any) -> JudgeReward:
    settings = ApiJudge(**{"type": type, "base_url": server.base_url(type), "cache_dir": None, **keys})
    return JudgeReward(settings, environment=ENVIRONMENT, backoff=quick_backoff())


def worth(score: float, prompt: str = "What is 6 times 7?", **fields: Any) -> Sample:
    return Sample("s", prompt, f"It is 42. [worth {score:g}]", **fields)


def scores_of(reward: JudgeReward, groups: Sequence[SampleGroup]) -> list[list[Score]]:
    async def run() -> list[list[Score]]:
        try:
            return await reward.score(groups)
        finally:
            await reward.close_async()

    reward.check()
    return asyncio.run(run())


def values_of(reward: JudgeReward, groups: Sequence[SampleGroup]) -> list[list[float | None]]:
    return [[score.value for score in group] for group in scores_of(reward, groups)]
