"""The reward of `simulated.py`: of any answer, the same in every process."""

import hashlib
from collections.abc import Mapping
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    return hashlib.blake2b(solution_str.encode(), digest_size=1).digest()[0] / 255
