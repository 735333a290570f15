"""The format reward: whether an answer matches a regular expression. An answer that the expression takes too long for
does not match."""

import re
from typing import Any

from rloom.rewards.rules.limited import evaluated


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, pattern: str
) -> dict[str, float | str | None]:
    expression = re.compile(pattern, re.DOTALL)
    found, fault = evaluated(lambda: expression.fullmatch(solution_str.strip()))
    return {"score": float(found is not None), "detail": fault and f"the answer was not matched: {fault}"}
