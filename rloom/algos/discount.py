"""How much of the reward at the end of an answer reaches its earlier tokens. Imports no torch."""

import math

SMALLEST_WEIGHT = (
    0.05  # of the reward in the advantage of a token: below it, the reward hardly changes the token's probability
)


def discount(estimator: str, gamma: float, lam: float) -> float:
    """The factor between the weights of the final reward in the advantages of a token and of the one before it."""
    return {"gae": gamma * lam, "reinforce_plus_plus": gamma, "remax": gamma}.get(estimator, 1.0)


def reach(factor: float) -> int:
    """Tokens before the reward whose advantage has at least SMALLEST_WEIGHT of it. 0.95 -> 58"""
    assert factor < 1  # else it reaches all
    return int(math.log(SMALLEST_WEIGHT) / math.log(factor)) if factor > 0 else 0
