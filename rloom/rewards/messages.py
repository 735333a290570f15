"""What the pool and its worker processes say to each other: pickles, each after its length.

pool → worker: one Setup, then a Sample a request; end of file means goodbye.
worker → pool: READY or a Refusal, then a Score a request. LOADING … READY in between stops the request's clock
while a library is imported.
"""

import enum
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rloom.types import Sample, Score

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Setup:
    path: str | None  # the user's file; None: the rules
    name: str
    reward_kwargs: Mapping[str, Any]
    timeout_s: float  # for one call
    load_limit_s: float  # for importing a file or a library


class Progress(enum.Enum):
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True)
class Refusal:
    """The user's function cannot be used, and why."""

    message: str


Reply = Score | Progress | Refusal


def encode(message: Setup | Sample | Reply) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def decode(receive: Callable[[int], bytes]) -> Any:
    """The next message. `receive(n)` gives 1 to n bytes, or none at the end of the file, which is an EOFError here."""
    (length,) = _LENGTH.unpack(_exactly(_LENGTH.size, receive))
    return pickle.loads(_exactly(length, receive))


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _exactly(count: int, receive: Callable[[int], bytes]) -> bytes:
    parts: list[bytes] = []
    while count:
        part = receive(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
