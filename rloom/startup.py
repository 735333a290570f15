"""Lines about the start of a command, with the seconds since it started. Imports nothing heavy."""

import logging
import time

log = logging.getLogger(__name__)
STARTED_S = time.monotonic()  # the commands import this module first


def announce(text: str) -> None:
    log.info(f"[{time.monotonic() - STARTED_S:5.1f} s] {text}")
