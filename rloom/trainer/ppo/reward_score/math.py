"""MATH, with verl's arguments."""

from rloom.rewards.rules import math
from rloom.trainer.ppo.reward_score import as_number

SOURCE = "DigitalLearningGmbH/MATH-lighteval"


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 if the last boxed answer is mathematically equal to the ground truth, else 0."""
    return as_number(math.compute_score(SOURCE, solution_str, ground_truth))
