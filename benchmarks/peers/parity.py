"""The reward of the comparison: 1 for about every second answer, by the parity of its ids. It takes no time and draws
nothing, so that a step measures the program around it. Imports nothing heavy: rloom's reward processes load this file.
"""

from collections.abc import Iterable
from typing import Any


def as_text(ids: Iterable[int]) -> str:
    """The text that the model folder's tokenizer encodes to these ids."""
    return " ".join(map(str, ids))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(sum(int(word) for word in solution_str.split() if word.isdecimal()) % 2)
