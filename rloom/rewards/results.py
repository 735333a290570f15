"""Convert the result of a reward function to a Score."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, SupportsFloat

from rloom.types import Score

ACCEPTED = "a number, or a dict with 'score'"
RESERVED = ("score", "pred", "detail")


def to_score(result: Any, function: str, logged: Mapping[str, Any] = MappingProxyType({})) -> Score:
    """`function`: its name, for the reason of a failure. `logged`: further values, as in a dict with 'score'."""
    if not isinstance(result, Mapping):
        return _score(result, logged, f"{function} returned")
    if "score" not in result:
        keys = ", ".join(repr(key) for key in result) or "no keys"
        return Score.failed(f"{function} returned a dict with {keys}; it needs a 'score'")
    return _score(result["score"], {**logged, **result}, f"{function} returned 'score' =")


def _score(value: Any, further: Mapping[str, Any], subject: str) -> Score:
    parts = {str(key): value for key, value in further.items() if key not in RESERVED and _is_number(value)}
    if not _is_number(value):
        return Score.failed(f"{subject} {_short(value)} ({type(value).__name__}); a reward is {ACCEPTED}")
    return Score.of(
        float(value),
        {name: float(part) for name, part in parts.items()},
        subject=f"{subject} {_short(value)}",
        prediction=_text(further.get("pred")),
        detail=_text(further.get("detail")),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _is_number(value: Any) -> bool:
    """True for int, float, bool, Fraction, and scalars of NumPy and torch, without importing those."""
    if type(value) is float:  # a check against a protocol takes longer than a rule
        return True
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
