"""GSM8K, with verl's arguments."""

from rloom.rewards.rules import gsm8k

SOURCE = "openai/gsm8k"


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for a correct answer, `format_score` for a wrong one, 0 without an answer."""
    found = gsm8k.compute_score(SOURCE, solution_str, ground_truth, method=method)
    if found["pred"] is None:
        return 0.0
    return score if found["score"] == 1.0 else format_score


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The number of the answer as text: after `####`, or with method=flexible the last number."""
    found = gsm8k.compute_score(SOURCE, solution_str, "0", method=method)["pred"]
    assert found is None or isinstance(found, str)
    return found
