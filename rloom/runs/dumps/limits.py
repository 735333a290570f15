"""How large dumps may be: of the folder, and of one step."""

import math

TOKEN_BYTES = 16  # of an answer's token in a dump: four columns of float16, its number and its text
DUMPS_TO_KEEP = 32  # at least, in a folder that has reached its limit


def limit_bytes(gigabytes: float | None) -> float:
    return math.inf if gigabytes is None else gigabytes * 1024**3


def tokens_of_a_step(limit: float) -> float:
    """Of a step with more, whole groups are drawn, so that the folder keeps other steps, too. `limit`: of the folder,
    in bytes."""
    return limit / DUMPS_TO_KEEP / TOKEN_BYTES
