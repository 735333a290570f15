"""A curve as one line of text."""

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float, width: int = 24) -> str:
    """The means of `width` equal parts of the curve, from `low` (the lowest bar) to `high` (the highest)."""
    width = min(width, len(values))
    span = high - low
    text = ""
    for part in range(width):
        inside = values[part * len(values) // width : (part + 1) * len(values) // width]
        height = (sum(inside) / len(inside) - low) / span if span > 0 else 0.0
        text += BARS[round(height * (len(BARS) - 1))]
    return text
