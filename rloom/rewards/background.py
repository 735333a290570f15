"""Rewards are computed during generation: a sample is scored while others are still being generated."""

import asyncio
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from rloom.errors import RewardError
from rloom.rewards.base import Reward
from rloom.types import SampleGroup, Score

_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")
REASONS_SHOWN = 5


class ScoreQueue(Protocol):
    @property
    def whole_groups(self) -> bool:
        """As in Reward."""

    def submit(self, group: SampleGroup) -> "Future[list[Score]]": ...


class RoundRobin:
    """Several queues used in turn, such as those of the machines of a run. All have the same reward."""

    def __init__(self, queues: Sequence[ScoreQueue]) -> None:
        self._queues, self._submitted = queues, 0

    @property
    def whole_groups(self) -> bool:
        return self._queues[0].whole_groups

    def submit(self, group: SampleGroup) -> "Future[list[Score]]":
        queue = self._queues[self._submitted % len(self._queues)]
        self._submitted += 1
        return queue.submit(group)


class BackgroundScorer:
    """Runs a Reward in an event loop, in a thread of its own. It owns the reward and closes it."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()
        self._closed = False

    @property
    def whole_groups(self) -> bool:
        return self._reward.whole_groups

    def submit(self, group: SampleGroup) -> "Future[list[Score]]":
        if self._closed:
            raise RuntimeError("this BackgroundScorer is closed")
        return asyncio.run_coroutine_threadsafe(self._score_one(group), self._loop)

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

    async def _score_one(self, group: SampleGroup) -> list[Score]:
        [scores] = await self._reward.score([group])
        return scores

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
