"""Messages over a pipe or a socket: each preceded by its length. Standard library only: the sandbox imports it."""

import os
import struct
from collections.abc import Callable

_LENGTH = struct.Struct("!Q")
LENGTH_BYTES = _LENGTH.size


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def read_frame(receive: Callable[[int], bytes], longest: int | None = None) -> bytes:
    """The next body. `receive(n)` returns 1 to n bytes, or none at the end of the file, which is an EOFError here.
    ValueError if it has more than `longest` bytes."""
    (length,) = _LENGTH.unpack(exactly(_LENGTH.size, receive))
    if longest is not None and length > longest:
        raise ValueError(f"a message of {length} bytes; at most {longest} are read")
    return exactly(length, receive)


def frame_end(data: memoryview, start: int) -> int | None:
    """Where the frame at `start` ends. None: it is not complete."""
    if len(data) < start + LENGTH_BYTES:
        return None
    (length,) = _LENGTH.unpack_from(data, start)
    end = start + LENGTH_BYTES + int(length)
    return end if end <= len(data) else None


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def exactly(count: int, receive: Callable[[int], bytes]) -> bytes:
    parts: list[bytes] = []
    while count:
        part = receive(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
