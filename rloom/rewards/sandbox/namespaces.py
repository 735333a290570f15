"""The file system and the namespaces of a launcher and its programs.

The launcher enters user, mount, network, ipc and uts namespaces once and builds a read-only root there, which has only
the interpreter, system libraries and a few devices. Each program gets its own pid, mount and ipc namespaces and an
empty scratch folder in memory. There is no /proc.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

from rloom.rewards.sandbox import linux

SCRATCH = "/scratch"
PACKAGES = "/packages"
_NEW_ROOT = "/proc"  # exists everywhere, and nothing is mounted from it
SYSTEM_FILES = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_READ_ONLY = linux.MS_RDONLY | linux.MS_NOSUID
_SCRATCH_FILES = 10_000
# statvfs flags (ST_*) that a remount in a user namespace must repeat: they have the values of the MS_* flags
_KEPT_FLAGS = linux.MS_NODEV | linux.MS_NOEXEC
_KEPT_TIMES = {1024: 1024, 2048: 2048, 4096: 1 << 21}  # ST_NOATIME, ST_NODIRATIME, ST_RELATIME -> MS_*


def unshare() -> None:
    """The namespaces that all programs of a launcher share. The uid map is written by the parent process."""
    linux.unshare(
        linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    )


def build_root(prefixes: Sequence[str], packages: Sequence[str]) -> None:
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        mounts = [line.split()[4] for line in stream]
    linux.mount("tmpfs", _NEW_ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=1m")
    shown = [
        *SYSTEM_FILES,
        *(path for prefix in prefixes for path in dict.fromkeys((prefix, os.path.realpath(prefix)))),
    ]
    for path in _outermost(shown):
        if os.path.islink(path):
            os.makedirs(os.path.dirname(_NEW_ROOT + path), exist_ok=True)
            os.symlink(os.readlink(path), _NEW_ROOT + path)
        elif os.path.exists(path):
            _show(path, path, mounts)
    for path in packages:
        _show(path, f"{PACKAGES}/{os.path.basename(path)}", mounts)
    for path in DEVICES:
        _place(_NEW_ROOT + path, folder=False)
        linux.mount(path, _NEW_ROOT + path, None, linux.MS_BIND)
    os.mkdir(_NEW_ROOT + SCRATCH)
    if not os.path.lexists(_NEW_ROOT + "/tmp"):
        os.symlink(SCRATCH, _NEW_ROOT + "/tmp")
    linux.pivot_root(_NEW_ROOT)
    linux.mount(None, "/", None, linux.MS_REMOUNT | linux.MS_BIND | _READ_ONLY | linux.MS_NODEV)


def unshare_for_program() -> None:
    """Called in the parent of the program's init process: a pid namespace begins with the next child."""
    linux.unshare(linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC)


def mount_scratch(uid: int, size_mb: int) -> None:
    options = f"mode=0700,uid={uid},gid={uid},size={size_mb}m,nr_inodes={_SCRATCH_FILES}"
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def map_ids(pid: int, uid: int) -> bool:
    """Map ids for the user namespace of `pid`: `uid` for programs, and root for the launcher if this process is root.
    Returns whether programs have another uid than this process."""
    own_uid, own_gid = os.geteuid(), os.getegid()
    if own_uid == 0:
        with contextlib.suppress(OSError):  # no CAP_SETUID, or `uid` does not exist in this container
            for name in ("gid_map", "uid_map"):
                _write(pid, name, f"0 0 1\n{uid} {uid} 1\n")
            return True
    _write(pid, "setgroups", "deny")
    _write(pid, "gid_map", f"{uid} {own_gid} 1\n")
    _write(pid, "uid_map", f"{uid} {own_uid} 1\n")
    return False


def _write(pid: int, name: str, content: str) -> None:
    with open(f"/proc/{pid}/{name}", "w") as stream:
        stream.write(content)


def _outermost(paths: Sequence[str]) -> Iterator[str]:
    """Without paths that are inside another one of the list."""
    for index, path in enumerate(paths):
        others = [*paths[:index], *(other for other in paths[index + 1 :] if other != path)]
        if not any(path == other or path.startswith(other.rstrip("/") + "/") for other in others):
            yield path


def _show(path: str, place: str, mounts: Sequence[str]) -> None:
    """Bind `path` with the mounts below it at `place` of the new root, read-only."""
    _place(_NEW_ROOT + place, folder=os.path.isdir(path))
    linux.mount(path, _NEW_ROOT + place, None, linux.MS_BIND | linux.MS_REC)
    below = [mount[len(path) :] for mount in mounts if mount.startswith(path.rstrip("/") + "/")]
    for rest in ("", *below):
        target = _NEW_ROOT + place + rest
        with contextlib.suppress(FileNotFoundError):  # hidden by another mount
            flags = os.statvfs(target).f_flag
            kept = flags & _KEPT_FLAGS | sum(flag for bit, flag in _KEPT_TIMES.items() if flags & bit)
            linux.mount(None, target, None, linux.MS_REMOUNT | linux.MS_BIND | _READ_ONLY | kept)


def _place(path: str, *, folder: bool) -> None:
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        with open(path, "w"):
            pass
