"""One line about the rewards of a step: how many answers of each data source are correct."""

import statistics
from collections.abc import Sequence

from rloom.types import Score


def reward_summary(scores: Sequence[tuple[str, Score]]) -> str:
    """`Rewards: openai/gsm8k 123 of 512 correct (24.0 %)`. `scores`: with the data source of each."""
    sources: dict[str, list[Score]] = {}
    for source, score in scores:
        sources.setdefault(source, []).append(score)
    return "Rewards: " + "; ".join(f"{source} {summary_of(found)}" for source, found in sources.items())


def summary_of(scores: Sequence[Score]) -> str:
    values = [score.accuracy for score in scores if score.accuracy is not None]
    failed = f", {len(scores) - len(values)} failed" if len(values) < len(scores) else ""
    if not values:
        return f"{len(scores)} failed"
    if set(values) <= {0, 1}:
        correct = round(sum(values))
        return f"{correct} of {len(values)} correct ({100 * correct / len(values):.1f} %){failed}"
    spread = f", std {statistics.stdev(values):.3g}" if len(values) > 1 else ""
    return f"{len(values)} answers, mean {statistics.fmean(values):.3g}{spread}{failed}"
