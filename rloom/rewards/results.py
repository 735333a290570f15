"""Convert the result of a reward function to a Score."""

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from rloom.types import Score

ACCEPTED = "a number, or a dict with 'score'"
NO_PARTS = ("score", "pred", "detail")


def to_score(result: Any, function: str) -> Score:
    """`function`: its name, for the reason of a failure."""
    if not isinstance(result, Mapping):
        return _score(result, {}, {}, f"{function} returned")
    if "score" not in result:
        keys = ", ".join(repr(key) for key in result) or "no keys"
        return Score.failed(f"{function} returned a dict with {keys}; it needs a 'score'")
    parts = {str(key): value for key, value in result.items() if key not in NO_PARTS and _is_number(value)}
    return _score(result["score"], parts, result, f"{function} returned 'score' =")


def _score(value: Any, parts: Mapping[str, Any], texts: Mapping[str, Any], subject: str) -> Score:
    if not _is_number(value):
        return Score.failed(f"{subject} {_short(value)} ({type(value).__name__}); a reward is {ACCEPTED}")
    for name, number in {"the reward": value, **parts}.items():
        if not math.isfinite(float(number)):
            return Score.failed(f"{subject} {_short(value)}; {name} is {float(number)}, which is not finite")
    return Score(
        value=float(value),
        parts={name: float(part) for name, part in parts.items()},
        prediction=_text(texts.get("pred")),
        detail=_text(texts.get("detail")),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _is_number(value: Any) -> bool:
    """True for int, float, bool, Fraction, and scalars of NumPy and torch, without importing those."""
    if not isinstance(value, SupportsFloat):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # several numbers, or too large for a float
        return False
    return True


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
