"""Run one program: its pipes, its limits, its end.

supervisor (this process, trusted) → init (pid 1 of the program's pid namespace) → program. When init ends, the kernel
kills all processes of the namespace. Without namespaces, init is an ordinary process and the supervisor kills all its
descendants.
"""

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from rloom.rewards.sandbox import harness, linux, namespaces
from rloom.rewards.sandbox.confine import Confinement
from rloom.rewards.sandbox.descendants import count_tasks, kill_descendants
from rloom.rewards.sandbox.settings import Run

_REPORT, _STATUS = 3, 4  # descriptors in the program
_HIGHEST_DESCRIPTOR = 4096
_STDERR_KEPT = 2000  # characters


@dataclass(frozen=True)
class Place:
    """Where programs run."""

    confinement: Confinement
    namespaces: bool
    program_uid: int  # owner of the scratch folder
    workspace: str | None  # folder for scratch folders; None: in memory


class NotConfined(Exception):
    """The sandbox could not be set up, so the program was not executed."""


def run(job: dict[str, Any], place: Place) -> Run:
    """NotConfined if the sandbox cannot be set up. Called in a process of its own, which ends afterwards."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    scratch = namespaces.SCRATCH
    if place.workspace is not None:
        scratch = tempfile.mkdtemp(dir=place.workspace)
        os.chown(scratch, place.program_uid, -1)
    try:
        if place.namespaces:
            namespaces.unshare_for_program()
        return _Supervision(job, place, scratch).run()
    except OSError as error:
        raise NotConfined(str(error)) from error
    finally:
        if place.workspace is not None:
            _remove(scratch)


class _Supervision:
    def __init__(self, job: dict[str, Any], place: Place, scratch: str) -> None:
        if not place.namespaces and place.confinement.uid is None:
            counted = replace(place.confinement, counted_tasks=count_tasks(os.getuid()))
            place = replace(place, confinement=counted)
        self._job, self._place, self._scratch = job, place, scratch
        self._limits = place.confinement.limits
        self._received = {name: bytearray() for name in ("stdout", "stderr", "report", "status")}
        self._begun = time.monotonic()

    def run(self) -> Run:
        pipes = {name: os.pipe() for name in self._received}
        stdin = os.memfd_create("stdin")
        with open(os.dup(stdin), "wb") as stream:
            stream.write(self._job["stdin"].encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        init = os.fork()
        if init == 0:
            _init(self._job, self._place, self._scratch, stdin, {name: pipe[1] for name, pipe in pipes.items()})
        os.close(stdin)
        for _, writer in pipes.values():
            os.close(writer)
        stopped = self._collect({name: pipe[0] for name, pipe in pipes.items()})
        self._end(init)
        return self._result(stopped)

    def _collect(self, readers: dict[str, int]) -> str | None:
        """Read until the program has ended; the limit that it exceeded, if any."""
        selector = selectors.DefaultSelector()
        for name, reader in readers.items():
            os.set_blocking(reader, False)
            selector.register(reader, selectors.EVENT_READ, name)
        deadline = self._begun + self._limits.timeout_s
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return f"time limit of {self._limits.timeout_s:g} s"
            ended = False
            for key, _ in selector.select(remaining_s):
                data = _read(key.fd)
                self._received[key.data] += data or b""
                if data == b"":
                    selector.unregister(key.fd)
                    ended = ended or key.data == "status"
            if sum(map(len, self._received.values())) > self._limits.output_kb * 1024:
                return f"output limit of {self._limits.output_kb} kB"
            if ended:
                for name in self._received:
                    self._received[name] += _read(readers[name]) or b""
                return None

    def _end(self, init: int) -> None:
        if self._place.namespaces:
            os.kill(init, signal.SIGKILL)  # its end is awaited below and includes the end of the whole namespace
            os.waitpid(init, 0)
        else:
            kill_descendants()

    def _result(self, stopped: str | None) -> Run:
        status: dict[str, Any] = {}
        for line in self._received["status"].splitlines():
            status |= json.loads(line)
        if "fault" in status:
            raise NotConfined(status["fault"])
        # without a status, init was killed with the program
        cpu_s, code = status.get("cpu_s", 0.0), status.get("code", -signal.SIGKILL)
        by_kernel = code == -signal.SIGKILL and cpu_s > self._limits.cpu_s  # SIGXCPU was ignored
        if stopped is None and (code == -signal.SIGXCPU or by_kernel):
            stopped = f"CPU time limit of {self._limits.cpu_s} s"
        text = {name: data.decode(errors="replace") for name, data in self._received.items()}
        return Run(
            stopped=stopped,
            exit_code=code,
            stdout=text["stdout"],
            stderr=text["stderr"][-_STDERR_KEPT:],
            report=text["report"],
            cpu_s=cpu_s,
            wall_s=time.monotonic() - self._begun,
        )


def _init(job: dict[str, Any], place: Place, scratch: str, stdin: int, writers: dict[str, int]) -> NoReturn:
    """Start the program, wait for it and for orphans, write its status."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if place.namespaces:
            namespaces.mount_scratch(place.program_uid, place.confinement.limits.file_mb)
        program = os.fork()
        if program == 0:
            _program(job, place, scratch, stdin, writers)
        for name in ("stdout", "stderr", "report"):
            os.close(writers[name])
        code, cpu_s = _wait_for(program)
        _write_status(writers["status"], code=code, cpu_s=cpu_s)
    except BaseException as error:
        _write_status(writers["status"], fault=str(error))
    os._exit(0)


def _wait_for(program: int) -> tuple[int, float]:
    """The program's exit code and its processor time."""
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _program(job: dict[str, Any], place: Place, scratch: str, stdin: int, writers: dict[str, int]) -> NoReturn:
    try:
        os.setsid()
        os.chdir(scratch)
        _take_descriptors(stdin, writers["stdout"], writers["stderr"], writers["report"], writers["status"])
        place.confinement.apply(scratch)
    except BaseException as error:
        _write_status(_STATUS, fault=str(error))
        os._exit(1)
    os.close(_STATUS)  # a program that could write it could declare its own failure a failure of the sandbox
    harness.execute(job, _REPORT)


def _take_descriptors(*descriptors: int) -> None:
    """Make them 0, 1, 2, ... and close all others."""
    # first copied to high numbers: a number may be both the source of one and the target of another
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
    for target, copy in enumerate(copies):
        os.dup2(copy, target, inheritable=target < _REPORT)
    os.closerange(len(copies), _HIGHEST_DESCRIPTOR)


def _write_status(descriptor: int, **status: Any) -> None:
    os.write(descriptor, json.dumps(status).encode() + b"\n")


def _read(descriptor: int) -> bytes | None:
    """Empty at the end of the file, None if there is nothing yet."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _remove(folder: str) -> None:
    for path, names, _ in os.walk(folder):  # the program may have made folders that not even their owner can list
        for name in names:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(path, name), 0o700, follow_symlinks=False)
    shutil.rmtree(folder, ignore_errors=True)
