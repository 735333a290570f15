"""End all descendants of a process without a pid namespace."""

import contextlib
import os
import signal
import time

_PAUSE_S = 0.005


def kill_descendants() -> None:
    """Kill all descendants of this process, which must be a child subreaper, and wait for them.

    They are stopped first, until a pass finds no new one: a process that is only killed could have forked again.
    """
    if not _reap():
        return  # orphans would be children of this process
    stopped: set[int] = set()
    while new := set(_descendants(os.getpid())) - stopped:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)
    while _reap() or _descendants(os.getpid()):
        for pid in _descendants(os.getpid()):
            _signal(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def count_tasks(uid: int) -> int:
    """Processes and threads of `uid` on this machine, which RLIMIT_NPROC counts."""
    tasks = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}").st_uid == uid:
                tasks += len(os.listdir(f"/proc/{name}/task"))
    return tasks


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stream:
            state, parent = stream.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found, waiting = [], [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _reap() -> bool:
    """Wait for children that have ended. Returns whether there are others."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
