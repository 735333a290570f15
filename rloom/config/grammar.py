"""Values in the grammar of `key=value`."""

import json
import re
from typing import Any


def override_value(value: Any) -> str:
    """A value in the grammar of `key=value`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {override_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(override_value(inner) for inner in value) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./][\w./:-]*", value) else "'" + value.replace("'", r"\'") + "'"
    return json.dumps(value)
