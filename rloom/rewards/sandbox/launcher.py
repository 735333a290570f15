"""The launcher: a small clean process that forks a supervisor for each program. See `client.py`.

It runs without site-packages and without an environment, so a forked program inherits nothing of the reward worker.
Its stdin is a socket to the reward worker.
"""

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from rloom.rewards.sandbox import confine, linux, namespaces, seccomp
from rloom.rewards.sandbox.harness import FILE
from rloom.rewards.sandbox.settings import (
    FIRST_UID,
    UIDS,
    Protections,
    SandboxSetup,
    receive,
    send,
    setup_of,
)
from rloom.rewards.sandbox.supervisor import NotConfined, Place, count_tasks, run

_SOCKET = 0
_FIRST_KERNEL_WITH_OWN_COUNTS = (5, 14)  # RLIMIT_NPROC is counted for each user namespace since then
_OWN_TASKS = 3  # launcher, supervisor and init, where they have the uid of the programs
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the memory limit has no room for more threads
_OWN_MODULES: list[ModuleType] = []  # rloom's modules, removed from sys.modules so that programs do not find them
# modules that are imported once here instead of in each program
_COMMON = (
    "bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools, math, operator, random, "
    "re, statistics, string, typing"
)


def main() -> None:
    # A scheduler sends SIGTERM to every process of a job, whose step is finished first. Programs inherit the block.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    own_code = sys.path.pop(0)  # programs do not import rloom
    assert own_code
    os.umask(0o022)  # programs have another uid and must be able to enter the folders of the new root
    setup = setup_of(receive(partial(os.read, _SOCKET)))
    uid = FIRST_UID + os.getpid() % UIDS
    processes = os.open("/proc", os.O_RDONLY)  # the new root has none; programs do not inherit it
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("1000")  # where memory runs out, the kernel ends a program and not the run
    group = _memory_group(setup)
    try:
        begin = with_namespaces if setup.namespaces else without_namespaces
        place, protections = begin(setup, uid, processes)
    except OSError as error:
        if group is not None:
            group.leave()
        send(_SOCKET, {"fault": str(error)})
        return
    protections = replace(protections, memory=group is not None)
    _reset_interpreter_state()
    gc.freeze()  # a collection in a program then does not copy the launcher's memory
    try:
        send(_SOCKET, protections)
        with socket.socket(fileno=os.dup(_SOCKET)) as connection:
            while files := socket.recv_fds(connection, 1, 2)[1]:
                _supervise(files, place)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the reward worker has ended
    finally:
        if place.workspace is not None:
            shutil.rmtree(place.workspace, ignore_errors=True)
        if group is not None:
            group.leave()


def _reset_interpreter_state() -> None:
    """Done once for all programs: each page of memory that a program changes itself is copied first."""
    exec(f"import {_COMMON}", {})
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    sys.argv = [FILE]
    # programs have other files as descriptors 0 to 2
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    _OWN_MODULES.extend(sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "rloom")


def _memory_group(setup: SandboxSetup) -> "MemoryGroup | None":
    try:
        return MemoryGroup(setup.limits.memory_mb)
    except OSError:  # most users may not make one; each process has its limit all the same
        return None


def with_namespaces(setup: SandboxSetup, uid: int, processes: int) -> tuple[Place, Protections]:
    kernel = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    own_counts = kernel >= _FIRST_KERNEL_WITH_OWN_COUNTS
    tasks, is_root = count_tasks(os.getuid()), os.geteuid() == 0
    namespaces.unshare()
    send(_SOCKET, {"pid": os.getpid(), "uid": uid})
    reply = receive(partial(os.read, _SOCKET))
    if "fault" in reply:
        raise OSError(f"the ids of the user namespace cannot be mapped: {reply['fault']}")
    namespaces.build_root(setup.prefixes, setup.packages)
    other_uid = bool(reply["other_uid"])
    policy = seccomp.Policy(only_own_signals=False, forbid_processes=is_root and not other_uid)
    fault = confine.seccomp_fault(policy)
    sys.path.append(namespaces.PACKAGES)
    linux.drop_bounding_set()  # nothing is executed here
    confinement = confine.Confinement(
        limits=setup.limits,
        uid=uid if other_uid else None,
        counted_tasks=0 if other_uid else _OWN_TASKS if own_counts else tasks + _OWN_TASKS,
        policy=policy,
        seccomp=fault is None,
        readable=None,
    )
    place = Place(confinement, namespaces=True, program_uid=uid, workspace=None, processes=processes)
    return place, _protections(confinement, True, {} if fault is None else {"seccomp": fault})


def without_namespaces(setup: SandboxSetup, uid: int, processes: int) -> tuple[Place, Protections]:
    is_root = os.geteuid() == 0
    faults = {}
    if is_root:
        fault = confine.fault_in_child(partial(_read_as, uid))
        if fault is not None:
            faults["uid"] = f"uid {uid} cannot read the interpreter: {fault}"
    other_uid = is_root and not faults
    policy = seccomp.Policy(only_own_signals=not other_uid, forbid_processes=is_root and not other_uid)
    fault = confine.seccomp_fault(policy)
    if fault is not None:
        faults["seccomp"] = fault
    if not confine.landlock_version():
        faults["landlock"] = "this kernel has no Landlock"
    workspace = tempfile.mkdtemp(prefix="rloom-sandbox-")
    os.chmod(workspace, 0o711)
    packages = os.path.join(workspace, "packages")
    os.mkdir(packages)
    for path in setup.packages:
        os.symlink(path, os.path.join(packages, os.path.basename(path)))
    sys.path.append(packages)
    confinement = confine.Confinement(
        limits=setup.limits,
        uid=uid if other_uid else None,
        counted_tasks=0,
        policy=policy,
        seccomp="seccomp" not in faults,
        readable=None
        if "landlock" in faults
        else (*namespaces.SYSTEM_FILES, *namespaces.DEVICES, *setup.prefixes, *setup.packages, packages),
    )
    program_uid = uid if other_uid else os.geteuid()
    place = Place(confinement, namespaces=False, program_uid=program_uid, workspace=workspace, processes=processes)
    return place, _protections(confinement, False, faults)


def _protections(confinement: confine.Confinement, with_namespaces: bool, faults: dict[str, str]) -> Protections:
    return Protections(
        namespaces=with_namespaces,
        uid=confinement.uid,
        seccomp=confinement.seccomp,
        landlock=confinement.readable is not None,
        fork=not confinement.policy.forbid_processes,
        memory=False,
        faults=faults,
    )


def _read_as(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with open(os.__file__, "rb"):
        pass


def _supervise(files: Sequence[int], place: Place) -> None:
    """Run a job in a supervisor process, which reads the files and answers the reward worker itself: this process, from
    which all programs are forked, has no part of an earlier one in its memory."""
    pid = os.fork()
    if pid == 0:
        _answer(files, place)
    for file in files:
        os.close(file)
    if os.waitpid(pid, 0)[1] != 0:
        send(_SOCKET, {"fault": "the supervisor of the program died"})


def _answer(files: Sequence[int], place: Place) -> NoReturn:
    code = 1
    try:
        with open(files[0], "rb") as stream:
            job = json.loads(stream.read())
        send(_SOCKET, run(job, files[1] if len(files) > 1 else None, place))
        code = 0
    except NotConfined as error:
        send(_SOCKET, {"fault": str(error)})
        code = 0
    finally:
        os._exit(code)


_MOUNT = Path("/sys/fs/cgroup")
_NAME = "rloom-sandbox-"
_OWN_BYTES = 128 << 20  # for the launcher, the supervisor and the process of the tests
_ATTEMPTS = 3


class MemoryGroup:
    """A limit over the memory of all processes of a program together, where this user may make a cgroup (versions 1 and
    2). The launcher enters the cgroup once and its programs begin in it: moving each program would cost milliseconds.

    Descriptors instead of paths: the launcher changes its root folder.
    """

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
