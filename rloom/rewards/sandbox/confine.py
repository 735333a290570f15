"""What a program's process gives up before it executes generated code, with and without namespaces."""

import ctypes
import math
import os
import resource
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rloom.rewards.sandbox import linux, seccomp
from rloom.rewards.sandbox.settings import Limits

_OPEN_FILES = 256
_MB = 1 << 20


@dataclass(frozen=True)
class Confinement:
    limits: Limits
    uid: int | None  # change to this uid; None: keep it
    counted_tasks: int  # processes and threads of the same uid outside the program, which RLIMIT_NPROC counts
    policy: seccomp.Policy
    seccomp: bool
    readable: Sequence[str] | None  # restrict files by Landlock to these; None: without Landlock

    def apply(self, scratch: str) -> None:
        """In the program's process. The order matters: each step may need what a later one takes away."""
        set_limits(self.limits, self.counted_tasks)
        if self.uid is not None:
            os.setgroups([])
            os.setresgid(self.uid, self.uid, self.uid)
            os.setresuid(self.uid, self.uid, self.uid)
        linux.drop_capabilities()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if self.readable is not None:
            restrict_files(self.readable, [scratch, "/dev/null"])
        if self.seccomp:
            seccomp.install(self.policy, os.getpid())


def set_limits(limits: Limits, counted_tasks: int) -> None:
    cpu_s = math.ceil(limits.cpu_s)
    values = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
        resource.RLIMIT_AS: _both(limits.memory_mb * _MB),
        resource.RLIMIT_FSIZE: _both(limits.file_mb * _MB),
        resource.RLIMIT_NPROC: _both(limits.processes + counted_tasks),
        resource.RLIMIT_NOFILE: _both(_OPEN_FILES),
        resource.RLIMIT_CORE: _both(0),
        resource.RLIMIT_MSGQUEUE: _both(0),
        resource.RLIMIT_MEMLOCK: _both(0),
    }
    for kind, (soft, hard) in values.items():
        _, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def seccomp_fault(policy: seccomp.Policy) -> str | None:
    """Why seccomp cannot be used; None: it can. Tried in a child process, because a filter cannot be removed."""
    seccomp.prepare(policy)

    def attempt() -> None:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install(policy, os.getpid())

    return fault_in_child(attempt)


def fault_in_child(attempt: Callable[[], None]) -> str | None:
    """The error of `attempt`, executed in a child process; None: there was none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
        except BaseException as error:
            os.write(writer, str(error).encode()[:4096])
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        message = stream.read()
    _, status = os.waitpid(pid, 0)
    return None if status == 0 else message.decode(errors="replace") or f"exit status {status}"


def _both(value: int) -> tuple[int, int]:
    return value, value


# Landlock restricts the files that a process and its children can open. It needs no privilege; Linux 5.13 or later.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_OF_VERSION_1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15  # since versions 2, 3 and 5
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def landlock_version() -> int:
    """0 where the kernel has no Landlock, or it is disabled."""
    try:
        return linux.syscall(_CREATE_RULESET, ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    except OSError:
        return 0


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow reading and executing beneath `readable`, everything beneath `writable`, and nothing elsewhere. Needs
    no_new_privs."""
    everything = _handled(landlock_version())
    ruleset = linux.syscall(
        _CREATE_RULESET, ctypes.c_char_p(struct.pack("Q", everything)), ctypes.c_size_t(8), ctypes.c_uint32(0)
    )
    try:
        for path in readable:
            _allow(ruleset, path, (_EXECUTE | _READ_FILE | _READ_DIR) & everything)
        for path in writable:
            _allow(ruleset, path, everything)
        linux.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


def _handled(abi: int) -> int:
    rights = _ALL_OF_VERSION_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if abi >= since:
            rights |= right
    return rights


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_A_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        linux.syscall(
            _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint32(0)
        )
    finally:
        os.close(descriptor)
