"""Waiting for a state that another thread or process brings about."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], limit_s: float = 60.0, poll_s: float = 0.02) -> None:
    """Returns as soon as it holds. The limit is for a machine that is busy."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s:g} s"
        time.sleep(poll_s)


def is_running(process: int) -> bool:
    """Of any process. One that its parent has not collected yet has ended."""
    if Path("/proc/self").exists():
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it ends while this reads
            return False
    else:
        listed = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True)
        state = listed.stdout.strip()
    return bool(state) and not state.startswith(("Z", "X"))
