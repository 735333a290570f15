"""What a reward function may return, made a Score."""

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from rloom.types import Score

ACCEPTED = "a number, or a dict with 'score'"


def to_score(result: Any, function: str) -> Score:
    """`function` says whose result it is, for the reason of a failure."""
    if not isinstance(result, Mapping):
        return _score(result, {}, None, f"{function} returned")
    if "score" not in result:
        keys = ", ".join(repr(key) for key in result) or "no keys"
        return Score.failed(f"{function} returned a dict with {keys}; it needs a 'score'")
    parts = {str(key): value for key, value in result.items() if key not in ("score", "pred") and _is_number(value)}
    return _score(result["score"], parts, result.get("pred"), f"{function} returned 'score' =")


def _score(value: Any, parts: Mapping[str, Any], prediction: Any, said: str) -> Score:
    if not _is_number(value):
        return Score.failed(f"{said} {_short(value)} ({type(value).__name__}); a reward is {ACCEPTED}")
    for name, number in {"the reward": value, **parts}.items():
        if not math.isfinite(float(number)):
            return Score.failed(f"{said} {_short(value)}; {name} is {float(number)}, which is not finite")
    return Score(
        value=float(value),
        parts={name: float(part) for name, part in parts.items()},
        prediction=None if prediction is None else str(prediction),
    )


def _is_number(value: Any) -> bool:
    """True for int, float, bool, Fraction, and the scalars of NumPy and torch, none of which is imported for it."""
    if not isinstance(value, SupportsFloat):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several numbers, an enormous integer
        return False
    return True


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
