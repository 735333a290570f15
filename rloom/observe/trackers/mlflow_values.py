"""Names and values as MLflow accepts them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_NAME = 250
MAX_PARAM = 500  # of servers before version 2; newer ones accept 6,000. `config.yaml` has the whole value


def metric_name(name: str) -> str:
    """`val-core/gsm8k/acc/mean@1` -> `val-core/gsm8k/acc/mean_at_1`, as verl writes it.

    MLflow accepts letters, digits, `_`, `-`, `.`, spaces and `/`, and no empty or relative part of a path.
    """
    allowed = re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME] or "_"


def params(config: Mapping[str, Any]) -> dict[str, str]:
    """The configuration as MLflow's parameters: dotted keys, short texts."""
    return {metric_name(key): str(value)[:MAX_PARAM] for key, value in _leaves(config)}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
