"""verl's reward functions under verl's names and arguments. The rules themselves are in `rloom.rewards.rules`."""

from collections.abc import Mapping
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.routing import registered, rule_for


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The score by the rule of this data source."""
    rule = rule_for(data_source)
    if rule is None:
        raise RewardError(f"data_source={data_source!r} has no rule; there are rules for {', '.join(registered())}")
    if rule.sandboxed:
        raise RewardError(
            f"data_source={data_source!r}: its rule runs generated code in a sandbox; use `rloom reward try`, or train"
        )
    return as_number(rule.compute_score(data_source, solution_str, ground_truth, extra_info))


def as_number(found: Mapping[str, float | str | None]) -> float:
    score = found["score"]
    assert isinstance(score, float)
    return score
