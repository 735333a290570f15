"""JSON for the page."""

import json
import math
from typing import Any

Json = Any


def to_json(value: Json) -> bytes:
    """NaN and infinities become null. All characters beyond ASCII are escaped: half a surrogate pair, too, is text."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


def finite(value: Json) -> Json:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
