"""Failed scores of a step: how many, for which reasons, and whether the run may go on."""

import re
from collections import defaultdict
from collections.abc import Sequence

from rloom.errors import RewardError
from rloom.types import Score

_DETAIL = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")
REASONS_SHOWN = 5


def check_failures(scores: Sequence[Score], max_failed_share: float) -> None:
    """Stop the run where more than `max_failed_share` of the scores failed, with the reasons."""
    failed = sum(not score.ok for score in scores)
    if not failed or failed <= max_failed_share * len(scores):
        return
    raise RewardError(
        f"{failed} of {len(scores)} rewards failed ({failed / len(scores):.1%}), "
        f"more than reward_model.max_failed_share={max_failed_share:g} allows. Most common, each with one example:\n"
        + "\n".join(f"  {line}" for line in common_reasons(scores))
        + "\nMend the reward function or the rows it fails on, or allow a larger share."
    )


def common_reasons(scores: Sequence[Score]) -> list[str]:
    """The most common reasons, each with its count and an example."""
    groups = _by_kind([score.reason for score in scores if score.reason is not None])
    lines = [f"{len(group)} × {group[0]}" for group in groups[:REASONS_SHOWN]]
    if len(groups) > REASONS_SHOWN:
        lines.append(f"and {len(groups) - REASONS_SHOWN} other reasons")
    return lines


def _by_kind(reasons: Sequence[str]) -> list[list[str]]:
    """Reasons that differ only in numbers and quoted values together, the largest group first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        groups[_DETAIL.sub("…", reason)].append(reason)
    return sorted(groups.values(), key=len, reverse=True)
