"""Functions for users' reward files. They are defined in such a file without an import; its own definitions win.

Other code imports them: `from rloom.rewards.helpers import extract_final_answer`.
"""

from collections.abc import Mapping
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.routing import ANSWER_LINE, options_for, registered, rule_for
from rloom.rewards.rules import gsm8k, math, math_reasoning
from rloom.rewards.rules.boxed import last_boxed
from rloom.rewards.rules.numbers import canonical

__all__ = ["default_compute_score", "extract_boxed_answer", "extract_final_answer", "extract_solution", "is_equiv"]


def extract_final_answer(solution_str: str) -> str | None:
    r"""What follows the last `答案：`, `Answer:`, `####`, or is in the last `\boxed{}`; without them, the last number.

    A number is written one way: `1,000 元`, `$1000.00` and `500 + 500 = 1000` are "1000". None if there is no answer.
    """
    return math_reasoning.final_answer(solution_str)


def extract_boxed_answer(solution_str: str) -> str | None:
    r"""The content of the last `\boxed{}`, without the braces."""
    return last_boxed(solution_str)


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """GSM8K's answer: the number after the last `####`, or with method="flexible" the last number."""
    number = gsm8k.finder(method)(solution_str)
    return None if number is None else canonical(number)


def is_equiv(answer: str | None, truth: str | None) -> bool:
    r"""Whether two answers are equal as mathematics: `\frac12` and `0.5`. The rule of MATH. None equals nothing."""
    return answer is not None and truth is not None and math.same_answer(answer, truth)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **reward_kwargs: Any,
) -> float | dict[str, float | str | None]:
    """The score of the rule for `data_source`. As in verl, it is a float, or for `math_dapo*` and `aime*` a dict with
    `score`, `acc` and `pred`. The rule reads its own of `reward_kwargs`; code needs `sandbox`, the keys of
    reward_model.sandbox."""
    rule = rule_for(data_source)
    if rule is None:
        raise RewardError(f"no reward rule for data_source={data_source!r}; registered: {', '.join(registered())}")
    keywords = options_for(rule, reward_kwargs)
    if rule.sandboxed:
        if "sandbox" not in reward_kwargs:
            raise RewardError(
                f"data_source={data_source!r}: its rule runs generated code in a sandbox; give its settings as "
                "sandbox={...}, or score the answer with `rloom reward try`"
            )
        keywords["sandbox"] = reward_kwargs["sandbox"]
    result = rule.compute_score(data_source, solution_str, ground_truth, extra_info, **keywords)
    return result if rule is ANSWER_LINE else float(result["score"] or 0.0)
