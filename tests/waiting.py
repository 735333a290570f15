"""Waiting for a state that another thread or process brings about."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Returns as soon as it holds. The limit is for a machine that is busy."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s"
        time.sleep(0.02)
