"""A limit over the memory of all processes of a program together, where this user may make a cgroup (versions 1 and 2).

The launcher enters the cgroup once and its programs begin in it: moving each program would cost milliseconds.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_NAME = "rloom-sandbox-"
_OWN_BYTES = 128 << 20  # for the launcher, the supervisor and the process of the tests
_ATTEMPTS = 3


class MemoryGroup:
    """Descriptors instead of paths: the launcher changes its root folder."""

    def __init__(self, memory_mb: int) -> None:
        """Enter a new cgroup. OSError where that is not possible."""
        for parent, limit in _places():
            for _ in range(_ATTEMPTS):
                with contextlib.suppress(OSError):
                    self._enter(parent, limit, (memory_mb << 20) + _OWN_BYTES)
                    return
        raise OSError(errno.EPERM, "this user may not make a cgroup with a memory limit")

    def _enter(self, parent: Path, limit: str, limit_bytes: int) -> None:
        for left in parent.glob(f"{_NAME}*"):  # killed launchers left them; one in use cannot be removed
            with contextlib.suppress(OSError):
                left.rmdir()
        self._name = f"{_NAME}{os.getpid()}"
        folder = parent / self._name
        folder.mkdir()
        try:
            (folder / limit).write_text(str(limit_bytes))
            (folder / "cgroup.procs").write_text("0")
        except OSError:
            folder.rmdir()
            raise
        self._parent = os.open(parent, os.O_PATH | os.O_CLOEXEC)
        self._processes = os.open(parent / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._processes, b"0")
            os.rmdir(self._name, dir_fd=self._parent)


def _places() -> Iterator[tuple[Path, str]]:
    """Folders in which a cgroup with a memory limit may be possible, and the name of the limit."""
    with open("/proc/self/cgroup", encoding="utf-8") as stream:
        lines = [line.rstrip("\n").split(":", 2) for line in stream]
    for _, controllers, path in lines:
        if controllers == "memory":
            yield _MOUNT / "memory" / path.lstrip("/"), "memory.limit_in_bytes"
        elif controllers == "":
            # A cgroup of version 2 with processes of its own has no children with limits; its parent may. Further up,
            # programs would be outside of the limits of the job.
            own = _MOUNT / path.lstrip("/")
            for folder in (own, own.parent):
                with contextlib.suppress(OSError):
                    if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                        yield folder, "memory.max"
