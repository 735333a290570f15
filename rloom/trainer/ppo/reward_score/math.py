"""MATH, with verl's arguments."""

from rloom.rewards.rules import math

SOURCE = "DigitalLearningGmbH/MATH-lighteval"


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 if the last boxed answer is mathematically equal to the ground truth, else 0."""
    return float(math.compute_score(SOURCE, solution_str, ground_truth)["acc"] or 0.0)
