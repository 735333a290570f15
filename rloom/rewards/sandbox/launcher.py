"""The launcher: a small clean process that forks a supervisor for each program. See `client.py`.

It runs without site-packages and without an environment, so a forked program inherits nothing of the reward worker.
Its stdin is a socket to the reward worker.
"""

import gc
import os
import shutil
import sys
import tempfile
from functools import partial
from typing import Any, NoReturn

from rloom.rewards.sandbox import confine, landlock, namespaces, seccomp
from rloom.rewards.sandbox.descendants import count_tasks
from rloom.rewards.sandbox.settings import (
    FIRST_UID,
    UIDS,
    Protections,
    Setup,
    as_message,
    receive,
    send,
    setup_of,
)
from rloom.rewards.sandbox.supervisor import NotConfined, Place, run

_SOCKET = 0
_FIRST_KERNEL_WITH_OWN_COUNTS = (5, 14)  # RLIMIT_NPROC is counted for each user namespace since then
_OWN_TASKS = 3  # launcher, supervisor and init, where they have the uid of the programs
# imported once here instead of in each program
_COMMON = (
    "bisect, collections, copy, datetime, decimal, fractions, functools, heapq, io, itertools, math, operator, random, "
    "re, statistics, string, typing"
)


def main() -> None:
    own_code = sys.path.pop(0)  # programs do not import rloom
    assert own_code
    os.umask(0o022)  # programs have another uid and must be able to enter the folders of the new root
    setup = setup_of(receive(partial(os.read, _SOCKET)))
    uid = FIRST_UID + os.getpid() % UIDS
    try:
        place, protections = with_namespaces(setup, uid) if setup.namespaces else without_namespaces(setup, uid)
    except OSError as error:
        send(_SOCKET, {"fault": str(error)})
        return
    exec(f"import {_COMMON}", {})
    gc.freeze()  # a collection in a program then does not copy the launcher's memory
    try:
        send(_SOCKET, as_message(protections))
        while True:
            send(_SOCKET, _supervised(receive(partial(os.read, _SOCKET)), place))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the reward worker has ended
    finally:
        if place.workspace is not None:
            shutil.rmtree(place.workspace, ignore_errors=True)


def with_namespaces(setup: Setup, uid: int) -> tuple[Place, Protections]:
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


def without_namespaces(setup: Setup, uid: int) -> tuple[Place, Protections]:
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
        faults=faults,
    )


def _read_as(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with open(os.__file__, "rb"):
        pass


def _supervised(job: dict[str, Any], place: Place) -> dict[str, Any]:
    """Run a job in a supervisor process. Its result comes through a pipe."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _supervise(job, place, writer)
    os.close(writer)
    try:
        result: dict[str, Any] = receive(partial(os.read, reader))
    except EOFError:
        result = {"fault": "the supervisor of the program died"}
    finally:
        os.close(reader)
        os.waitpid(pid, 0)
    return result


def _supervise(job: dict[str, Any], place: Place, writer: int) -> NoReturn:
    try:
        send(writer, as_message(run(job, place)))
    except NotConfined as error:
        send(writer, {"fault": str(error)})
    finally:
        os._exit(0)
