"""The launcher: a small clean process that forks a supervisor for each program. See `client.py`.

It runs without site-packages and without an environment, so a forked program inherits nothing of the reward worker.
Its stdin is a socket to the reward worker.
"""

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import NoReturn

from rloom.rewards.sandbox import confine, landlock, linux, namespaces, seccomp
from rloom.rewards.sandbox.cgroup import MemoryGroup
from rloom.rewards.sandbox.descendants import count_tasks
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
from rloom.rewards.sandbox.supervisor import NotConfined, Place, run

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
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("1000")  # where memory runs out, the kernel ends a program and not the run
    group = _memory_group(setup)
    try:
        place, protections = with_namespaces(setup, uid) if setup.namespaces else without_namespaces(setup, uid)
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


def _memory_group(setup: SandboxSetup) -> MemoryGroup | None:
    try:
        return MemoryGroup(setup.limits.memory_mb)
    except OSError:  # most users may not make one; each process has its limit all the same
        return None


def with_namespaces(setup: SandboxSetup, uid: int) -> tuple[Place, Protections]:
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
    return Place(confinement, namespaces=True, program_uid=uid, workspace=None), _protections(
        confinement, True, {} if fault is None else {"seccomp": fault}
    )


def without_namespaces(setup: SandboxSetup, uid: int) -> tuple[Place, Protections]:
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
    if not landlock.version():
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
    place = Place(confinement, namespaces=False, program_uid=uid if other_uid else os.geteuid(), workspace=workspace)
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
