"""Landlock: restrict the files that a process and its children can open. Needs no privilege; Linux 5.13 or later."""

import ctypes
import os
import struct
from collections.abc import Sequence

from rloom.rewards.sandbox import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_VERSION_FLAG = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_OF_VERSION_1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15  # since versions 2, 3 and 5
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def version() -> int:
    """0 where the kernel has no Landlock, or it is disabled."""
    try:
        return linux.syscall(_CREATE_RULESET, ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    except OSError:
        return 0


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Allow reading and executing beneath `readable`, everything beneath `writable`, and nothing elsewhere. Needs
    no_new_privs."""
    everything = _handled(version())
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
