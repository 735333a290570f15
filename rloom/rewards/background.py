"""Rewards beside generation: a sample is scored while its siblings are still being written."""

import asyncio
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import cycle
from typing import Protocol

from rloom.errors import RewardError
from rloom.rewards.base import Reward
from rloom.types import Sample, Score

_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")
REASONS_SHOWN = 5


class ScoreQueue(Protocol):
    def submit(self, sample: Sample) -> "Future[Score]": ...


class RoundRobin:
    """Several queues, one after the other: of the machines of a run, say."""

    def __init__(self, queues: Sequence[ScoreQueue]) -> None:
        self._next = cycle(queues)

    def submit(self, sample: Sample) -> "Future[Score]":
        return next(self._next).submit(sample)


class BackgroundScorer:
    """Any Reward, driven by an event loop in a thread of its own. It owns the reward and closes it."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()
        self._closed = False

    def submit(self, sample: Sample) -> "Future[Score]":
        if self._closed:
            raise RuntimeError("this BackgroundScorer is closed")
        return asyncio.run_coroutine_threadsafe(self._score_one(sample), self._loop)

    def close(self) -> None:
        """Cancel what is still being scored, close the reward, end the thread."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._reward.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _score_one(self, sample: Sample) -> Score:
        [score] = await self._reward.score([sample])
        return score

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


def check_failures(scores: Sequence[Score], max_failed_share: float) -> None:
    """Stop the run where more than `max_failed_share` of the scores failed, with the reasons."""
    reasons = [score.reason for score in scores if score.reason is not None]
    if not reasons or len(reasons) <= max_failed_share * len(scores):
        return
    groups = _by_kind(reasons)
    lines = [f"  {len(group)} × {group[0]}" for group in groups[:REASONS_SHOWN]]
    if len(groups) > REASONS_SHOWN:
        lines.append(f"  and {len(groups) - REASONS_SHOWN} other reasons")
    raise RewardError(
        f"{len(reasons)} of {len(scores)} rewards failed ({len(reasons) / len(scores):.1%}), "
        f"more than reward_model.max_failed_share={max_failed_share:g} allows. Most common, each with one example:\n"
        + "\n".join(lines)
        + "\nMend the reward function or the rows it fails on, or allow a larger share."
    )


def _by_kind(reasons: Sequence[str]) -> list[list[str]]:
    """Reasons that differ only in numbers and quoted values together, the largest group first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        groups[_DETAIL.sub("…", reason)].append(reason)
    return sorted(groups.values(), key=len, reverse=True)
