"""The format reward: whether an answer matches a regular expression. A reward worker loads it like a user's function,
so an expression that never ends fails one sample at its time limit and stops nothing."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, pattern: str
) -> float:
    return float(re.fullmatch(pattern, solution_str.strip(), re.DOTALL) is not None)
