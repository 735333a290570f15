"""A seccomp filter: the system calls that a generated program may not make fail with EPERM.

It refuses sockets, namespaces, mounts, tracing and signalling of other processes, kernel interfaces that a solution
never uses (bpf, io_uring, keys, performance events), and memory that no rlimit counts (memfd, System V shared memory).
"""

import ctypes
import errno
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rloom.rewards.sandbox import linux

# name -> (x86_64, aarch64); None: this architecture has no such call
DENIED: Mapping[str, tuple[int, int | None]] = {
    "socket": (41, 198),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "personality": (135, 92),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
SIGNALS_BY_OTHER_MEANS: Mapping[str, tuple[int, int | None]] = {
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
FORK: Mapping[str, tuple[int, int | None]] = {"fork": (57, None), "vfork": (58, None)}
KILL, TGKILL, CLONE, CLONE3 = (62, 129), (234, 131), (56, 220), (435, 435)
PRLIMIT, SCHED_SETAFFINITY = (302, 261), (203, 122)
SOCKETPAIR = (53, 199)

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000  # x86_64: system calls of the x32 interface have numbers from here
_NAMESPACE_FLAGS = 0x7E020000  # all CLONE_NEW* that clone has
_CLONE_THREAD = 0x10000
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP = {"x86_64": 317, "aarch64": 277}

# classic BPF: code, jump if true, jump if false, constant
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENT_OFFSET, _ARGUMENT_SIZE = 0, 4, 16, 8
_OWN_PID = 0x5EC0_3B17  # stands for the process's own pid; no pid, system call or constant has this value
_SOCKET_TYPES, _SOCK_STREAM = 0xF, 1  # the higher bits are flags
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


@dataclass(frozen=True)
class Policy:
    only_own_signals: bool  # programs have the uid of other processes: a signal may reach only the program itself
    forbid_processes: bool  # RLIMIT_NPROC does not apply to this uid, so no processes are allowed; threads are


def install(policy: Policy, own_pid: int) -> None:
    """Needs no_new_privs. OSError where the kernel has no seccomp, or the architecture is not known."""
    name = linux.machine()
    if name not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no seccomp filter for {name}")
    program = own_filter(policy, own_pid, name)
    code = ctypes.c_char_p(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.c_void_p.from_buffer(code).value)
    linux.syscall(_SECCOMP[name], ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER), ctypes.c_ulong(0), ctypes.c_char_p(header))


def prepare(policy: Policy) -> None:
    """Build the common part of the filter in this process, for all its children."""
    if linux.machine() in _ARCHITECTURES:
        build(policy, linux.machine())


def own_filter(policy: Policy, own_pid: int, machine: str) -> bytes:
    """The filter for one process. The common part is built once, in the launcher."""
    common = build(policy, machine)
    return common.replace(_word(_OWN_PID), _word(own_pid)).replace(_word(-_OWN_PID), _word(-own_pid))


@cache
def build(policy: Policy, machine: str) -> bytes:
    """The filter in the kernel's format, with `_OWN_PID` for the process."""
    own_pid = _OWN_PID
    column = list(_ARCHITECTURES).index(machine)
    denied = dict(DENIED)
    if policy.only_own_signals:
        denied |= SIGNALS_BY_OTHER_MEANS
    if policy.forbid_processes:
        denied |= FORK
    lines = [
        _line(_LOAD, _ARCHITECTURE_OFFSET),
        _line(_JUMP_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _return(_KILL_PROCESS),
        _line(_LOAD, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        lines += [_line(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), _return(_KILL_PROCESS)]
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            lines += [_line(_JUMP_EQUAL, number, 0, 1), _refuse()]
    # glibc uses clone where clone3 does not exist; the flags of clone3 are in memory, which a filter cannot read
    lines += [_line(_JUMP_EQUAL, CLONE3[column], 0, 1), _refuse(errno.ENOSYS)]
    lines += _clone(CLONE[column], policy.forbid_processes)
    lines += _socketpair(SOCKETPAIR[column])
    lines += _argument_in(PRLIMIT[column], [0, own_pid])
    lines += _argument_in(SCHED_SETAFFINITY[column], [0, own_pid])
    if policy.only_own_signals:
        lines += _argument_in(KILL[column], [0, own_pid, -own_pid])
        lines += _argument_in(TGKILL[column], [own_pid])
    return b"".join([*lines, _return(_ALLOW)])


def _clone(number: int, forbid_processes: bool) -> list[bytes]:
    body = [_line(_LOAD, _ARGUMENT_OFFSET), _line(_JUMP_ANY_BIT, _NAMESPACE_FLAGS, 0, 1), _refuse()]
    if forbid_processes:
        body += [_line(_JUMP_ANY_BIT, _CLONE_THREAD, 1, 0), _refuse()]
    body.append(_return(_ALLOW))
    return [_line(_JUMP_EQUAL, number, 0, len(body)), *body]


def _socketpair(number: int) -> list[bytes]:
    """Of streams only: asyncio uses them. A datagram can be sent from such a pair to any other socket of the host."""
    body = [
        _line(_LOAD, _ARGUMENT_OFFSET + _ARGUMENT_SIZE),
        _line(_AND, _SOCKET_TYPES),
        _line(_JUMP_EQUAL, _SOCK_STREAM, 1, 0),
        _refuse(),
        _return(_ALLOW),
    ]
    return [_line(_JUMP_EQUAL, number, 0, len(body)), *body]


def _argument_in(number: int, allowed: Sequence[int]) -> list[bytes]:
    """Call `number` is allowed if its first argument is one of `allowed`."""
    body = [_line(_LOAD, _ARGUMENT_OFFSET)]
    for position, value in enumerate(allowed):
        body.append(_line(_JUMP_EQUAL, value & 0xFFFFFFFF, len(allowed) - position, 0))
    body += [_refuse(), _return(_ALLOW)]
    return [_line(_JUMP_EQUAL, number, 0, len(body)), *body]


def _line(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, constant)


def _word(value: int) -> bytes:
    return struct.pack("I", value & 0xFFFFFFFF)


def _return(action: int) -> bytes:
    return _line(_RETURN, action)


def _refuse(number: int = errno.EPERM) -> bytes:
    return _return(_ERRNO | number)
