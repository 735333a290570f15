"""Names and values as MLflow accepts them."""

import re
from collections.abc import Mapping
from typing import Any

from rloom.runs.run_folder import flat_config

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
    return {metric_name(key): str(value)[:MAX_PARAM] for key, value in flat_config(config).items()}
