"""System calls that Python 3.11 does not have, through ctypes: namespaces, mounts, capabilities, prctl.

Standard library only: the launcher imports this file without site-packages.
"""

import ctypes
import os
import platform

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_HEADER, _NO_CAPABILITIES = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
_LAST_CAPABILITY = 63  # the kernel answers EINVAL for those that it does not have

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def machine() -> str:
    return platform.machine()


def syscall(number: int, *arguments: object) -> int:
    """`arguments`: ctypes values. OSError if the call fails."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _checked(
        _libc.mount(*map(ctypes.c_char_p, encoded), ctypes.c_ulong(flags), ctypes.c_char_p(options.encode())),
        f"mount {target}",
    )


def pivot_root(folder: str) -> None:
    """Make `folder`, a mount point, the root of this mount namespace, and detach the previous root."""
    os.chdir(folder)
    here = ctypes.c_char_p(b".")
    syscall(_PIVOT_ROOT[machine()], here, here)
    _checked(_libc.umount2(here, ctypes.c_int(MNT_DETACH)), "umount2")
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def drop_bounding_set() -> None:
    """No exec of this process and its children brings a capability back."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # EINVAL: no such capability; EPERM: without CAP_SETPCAP the set cannot change
            continue


def drop_capabilities() -> None:
    """All capabilities of this process. It begins with an empty bounding set."""
    _checked(_libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES), "capset")


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
