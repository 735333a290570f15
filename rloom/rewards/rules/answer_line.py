r"""DAPO's data and AIME: the last line `Answer: ...`, or the last `\boxed` answer if there is no such line.

The score is 1 or -1, as in verl, whose DAPO recipe sets its length penalty for that range; `acc` is 1 or 0.
"""

import re
from collections.abc import Mapping
from typing import Any

from rloom.rewards.rules.boxed import last_boxed
from rloom.rewards.rules.limited import result
from rloom.rewards.rules.math import compared, true_answer

WRONG = -1.0
_LINE = re.compile(r"answer[*_`]*\s*[:：][*_` \t]*([^\n]+)", re.IGNORECASE)
_AROUND = " \t*_`"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float | str | None]:
    truth = true_answer(data_source, ground_truth)
    answer = answer_of(solution_str)
    right, fault = compared(answer, truth)
    return result(right, answer, fault, wrong=WRONG)


def answer_of(solution: str) -> str | None:
    lines = _LINE.findall(solution)
    if not lines:
        return last_boxed(solution)
    line = lines[-1].strip(_AROUND)
    return last_boxed(line) if r"\boxed" in line else line or None
