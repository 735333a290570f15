"""verl's reward functions under verl's names and arguments. The rules themselves are in `rloom.rewards.rules`."""

from rloom.rewards.helpers import default_compute_score

__all__ = ["default_compute_score"]
