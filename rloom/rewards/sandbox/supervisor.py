"""Run one program: its pipes, its limits, its end.

supervisor (this process, trusted) → init (pid 1 of the program's pid namespace) → program. Where there are tests, init
becomes their process after it has started the program. When init ends, the kernel kills all processes of the namespace.
Without namespaces, init is an ordinary process and the supervisor kills all its descendants.
"""

import contextlib
import fcntl
import json
import os
import random
import selectors
import shutil
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from rloom.rewards.sandbox import harness, linux, namespaces, tests
from rloom.rewards.sandbox.confine import Confinement
from rloom.rewards.sandbox.settings import Limits, SandboxRun

# descriptors in the program and in the process of the tests, after stdin, stdout and stderr
_REPORT = _CONNECTION = 3
_TESTS, _TESTS_REPORT, _TESTS_STATUS = 4, 5, 6
_EXIT_GRACE_S = 0.5  # a program has this long to exit after its tests
# Between two looks at the time of a program. It does not know when, so that it cannot be awake at each.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 0.4
_BUSY_FACTOR = 5.0  # so many times the limit in wall time where the kernel does not tell how long a program waited
_HIGHEST_DESCRIPTOR = 4096
_TIME_LIMIT = "time limit"
_STDERR_KEPT = 2000  # characters
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Place:
    """Where programs run."""

    confinement: Confinement
    namespaces: bool
    program_uid: int  # owner of the scratch folder
    workspace: str | None  # folder for scratch folders; None: in memory
    processes: int  # descriptor of /proc, which the new root does not have


class NotConfined(Exception):
    """The sandbox could not be set up, so the program was not executed."""


def run(job: dict[str, Any], test_file: int | None, place: Place) -> SandboxRun:
    """NotConfined if the sandbox cannot be set up. Called in a process of its own, which ends afterwards.

    `test_file`: a memory file that only the process of the tests reads. A program is a copy of its ancestors, so that
    what they have read could be found in its memory.
    """
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    scratch = namespaces.SCRATCH
    if place.workspace is not None:
        scratch = tempfile.mkdtemp(dir=place.workspace)
        os.chown(scratch, place.program_uid, -1)
    try:
        if place.namespaces:
            namespaces.unshare_for_program()
        return _Supervision(job, test_file, place, scratch).run()
    except OSError as error:
        raise NotConfined(str(error)) from error
    finally:
        if place.workspace is not None:
            _remove(scratch)


class _Supervision:
    def __init__(self, job: dict[str, Any], test_file: int | None, place: Place, scratch: str) -> None:
        confinement = place.confinement
        if job["limits"] is not None:
            confinement = replace(confinement, limits=Limits(**job["limits"]))
        if not place.namespaces and confinement.uid is None:
            confinement = replace(confinement, counted_tasks=count_tasks(os.getuid()))
        if test_file is not None:
            confinement = replace(confinement, counted_tasks=confinement.counted_tasks + 1)
        self._job, self._test_file, self._scratch = job, test_file, scratch
        self._place = replace(place, confinement=confinement)
        self._limits = confinement.limits
        self._received = {name: bytearray() for name in ("stdout", "stderr", "report", "status")}
        self._begun, self._cpu_s, self._slept_s = time.monotonic(), 0.0, 0.0
        self._looked_s = self._ran_or_waited_s = 0.0  # when, and what was found
        self._draw = random.SystemRandom()

    def run(self) -> SandboxRun:
        pipes = {name: os.pipe() for name in self._received}
        stdin = os.memfd_create("stdin")
        with open(os.dup(stdin), "wb") as stream:
            stream.write(self._job["stdin"].encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        init = os.fork()
        if init == 0:
            writers = {name: pipe[1] for name, pipe in pipes.items()}
            _Init(self._job, self._place, self._scratch, stdin, self._test_file, writers).run()
        os.close(stdin)
        if self._test_file is not None:
            os.close(self._test_file)
        for _, writer in pipes.values():
            os.close(writer)
        stopped = self._collect(init, {name: pipe[0] for name, pipe in pipes.items()})
        self._end(init)
        return self._result(stopped)

    def _collect(self, init: int, readers: dict[str, int]) -> str | None:
        """Read until the program has ended; the limit that it exceeded, if any."""
        selector = selectors.DefaultSelector()
        for name, reader in readers.items():
            os.set_blocking(reader, False)
            selector.register(reader, selectors.EVENT_READ, name)
        next_look = self._next_look(0.0, self._limits.cpu_s)
        while True:
            wall_s = time.monotonic() - self._begun
            if wall_s >= next_look:
                remaining_s = self._remaining_s(init, wall_s)
                if wall_s >= self._limits.timeout_s:
                    return f"{_TIME_LIMIT} of {self._limits.timeout_s:g} s"
                if remaining_s <= 0:
                    return self._own_time_limit(self._cpu_s)
                next_look = self._next_look(wall_s, remaining_s)
            ended = False
            for key, _ in selector.select(max(0.0, next_look - wall_s)):
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

    def _next_look(self, wall_s: float, remaining_s: float) -> float:
        wait_s = max(_SHORTEST_WAIT_S, min(remaining_s, self._draw.uniform(_LONGEST_WAIT_S / 2, _LONGEST_WAIT_S)))
        return min(self._limits.timeout_s, wall_s + wait_s)

    def _remaining_s(self, init: int, wall_s: float) -> float:
        """Until the limit of its own time is reached, at least: processor time of all its processes, and sleep. Time in
        which it waits for a processor is not its own, so that a busy machine does not decide."""
        used = used_times(self._place.processes, init)
        if used is None:
            return self._limits.cpu_s - wall_s / _BUSY_FACTOR
        self._cpu_s = used.cpu_s
        if used.asleep:  # else a thread may be waiting since it last ran, which the kernel counts at the end
            awake_s = max(0.0, used.ran_or_waited_s - self._ran_or_waited_s)  # less, if a process has ended
            self._slept_s += max(0.0, wall_s - self._looked_s - awake_s)
        self._looked_s, self._ran_or_waited_s = wall_s, used.ran_or_waited_s
        return self._limits.cpu_s - used.cpu_s - self._slept_s

    def _own_time_limit(self, cpu_s: float) -> str:
        kind = f"CPU {_TIME_LIMIT}" if cpu_s > self._limits.cpu_s / 2 else _TIME_LIMIT
        return f"{kind} of {round(self._limits.cpu_s, 2):g} s"

    def _end(self, init: int) -> None:
        if self._place.namespaces:
            os.kill(init, signal.SIGKILL)  # its end is awaited below and includes the end of the whole namespace
            os.waitpid(init, 0)
        else:
            kill_descendants(self._place.processes)

    def _result(self, stopped: str | None) -> SandboxRun:
        status: dict[str, Any] = {}
        for line in self._received["status"].splitlines():
            status |= json.loads(line)
        if "fault" in status:
            raise NotConfined(status["fault"])
        # without a status, init was killed with the program
        cpu_s, code = status.get("cpu_s", self._cpu_s), status.get("code", -signal.SIGKILL)
        by_kernel = code == -signal.SIGKILL and cpu_s > self._limits.cpu_s  # SIGXCPU was ignored
        if stopped is None and (code == -signal.SIGXCPU or by_kernel):
            stopped = self._own_time_limit(cpu_s)
        text = {name: data.decode(errors="replace") for name, data in self._received.items()}
        return SandboxRun(
            stopped=stopped,
            out_of_time=stopped is not None and _TIME_LIMIT in stopped,
            exit_code=code,
            stdout=text["stdout"],
            stderr=text["stderr"][-_STDERR_KEPT:],
            report=text["report"],
            cpu_s=cpu_s,
            wall_s=time.monotonic() - self._begun,
        )


@dataclass(frozen=True)
class _Init:
    """The first process of a program's namespace: starts the program, waits for it and for orphans, writes its status.
    With tests, it becomes their process."""

    job: dict[str, Any]
    place: Place
    scratch: str
    stdin: int
    test_file: int | None
    writers: dict[str, int]

    def run(self) -> NoReturn:
        try:
            # the program may send signals to pid 1 of its namespace: without a handler they have no effect
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            if self.place.namespaces:
                namespaces.mount_scratch(self.place.program_uid, self.place.confinement.limits.file_mb)
            else:
                linux.drop_bounding_set()  # with namespaces, the launcher has done so
            if self.test_file is not None:
                self._run_with_tests(self.test_file)
            status = self._run_program()
        except BaseException as error:
            status = {"fault": str(error)}
        _write_status(self.writers["status"], **status)
        os._exit(0)

    def _run_program(self) -> dict[str, Any]:
        program = os.fork()
        if program == 0:
            self._confine(self.stdin, self.writers["stdout"], self.writers["stderr"], self.writers["report"])
            harness.execute(self.job, _REPORT)
        for name in ("stdout", "stderr", "report"):
            os.close(self.writers[name])
        while (status := _reaped(program)) is None:
            pass
        return status

    def _run_with_tests(self, test_file: int) -> NoReturn:
        program_end, tests_end = socket.socketpair()
        program = os.fork()
        if program == 0:
            self._confine(self.stdin, self.writers["stdout"], self.writers["stderr"], program_end.fileno())
            harness.serve(self.job, _CONNECTION)
        nothing = os.open(os.devnull, os.O_RDWR)
        # with the rights of the program: tests are code of a data set
        self._confine(
            nothing, nothing, nothing, tests_end.fileno(), test_file, self.writers["report"], keep_status=True
        )
        longest_message = self.place.confinement.limits.output_kb * 1024
        tests.execute(_TESTS, _CONNECTION, _TESTS_REPORT, longest_message, end=partial(_end_after_tests, program))

    def _confine(self, *descriptors: int, keep_status: bool = False) -> None:
        """Leave this process with these descriptors only, as 0, 1, 2, ..., and without rights."""
        status = len(descriptors)
        try:
            os.setsid()
            os.chdir(self.scratch)
            tempfile.tempdir = self.scratch
            _take_descriptors(*descriptors, self.writers["status"])
            self.place.confinement.apply(self.scratch)
        except BaseException as error:
            _write_status(status, fault=str(error))
            os._exit(1)
        if not keep_status:
            os.close(status)  # a program that could write it could declare its own failure a failure of the sandbox


def _end_after_tests(program: int) -> NoReturn:
    """In the process of the tests. The program ends when the connection closes, or it has ended already; one that goes
    on is killed with the rest of the namespace."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    os.close(_CONNECTION)
    status, deadline = None, time.monotonic() + _EXIT_GRACE_S
    while (status := _reaped(program, os.WNOHANG)) is None and time.monotonic() < deadline:
        signal.sigtimedwait([signal.SIGCHLD], max(0.0, deadline - time.monotonic()))
    status = status or {"code": 0, "cpu_s": 0.0}
    own = os.times()
    _write_status(_TESTS_STATUS, code=status["code"], cpu_s=status["cpu_s"] + own.user + own.system)
    os._exit(0)


def _reaped(program: int, options: int = 0) -> dict[str, Any] | None:
    """Wait for any child. The exit code and the processor time of the program, if it was the program."""
    pid, status, usage = os.wait4(-1, options)
    if pid != program:
        return None
    return {"code": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}


def _take_descriptors(*descriptors: int) -> None:
    """Make them 0, 1, 2, ... and close all others."""
    # first copied to high numbers: a number may be both the source of one and the target of another
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in descriptors]
    for target, copy in enumerate(copies):
        os.dup2(copy, target, inheritable=target <= 2)
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
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # the program may have made folders that not even their owner can list, or many folders inside each other
        for command in (["chmod", "-fR", "u+rwx", folder], ["rm", "-rf", folder]):
            os.spawnvp(os.P_WAIT, command[0], command)  # subprocess would import threading, which makes forks slower


_PAUSE_S = 0.005


def kill_descendants(processes: int) -> None:
    """Kill all descendants of this process, which must be a child subreaper, and wait for them.

    They are stopped first, until a pass finds no new one: a process that is only killed could have forked again.
    """
    if not _reap():
        return  # orphans would be children of this process
    stopped: set[int] = set()
    while new := set(_descendants(processes)) - stopped:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        _signal(pid, signal.SIGKILL)
    while _reap() or _descendants(processes):
        for pid in _descendants(processes):
            _signal(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


class UsedTimes(NamedTuple):
    """Of all processes of a program, until now."""

    cpu_s: float  # with the process of the tests, which may call the program without end
    ran_or_waited_s: float  # on a processor, or ready to run while others ran
    asleep: bool  # none is ready to run


def used_times(processes: int, init: int) -> UsedTimes | None:
    """Of the program of this supervisor. `processes`: a descriptor of /proc. None: the kernel does not tell."""
    try:
        if not int(_content(processes, f"{init}/schedstat").split()[0]):  # without CONFIG_SCHED_INFO all is 0
            return None
    except OSError:
        return None
    cpu_s = waited_s = 0.0
    pids = _descendants(processes)
    asleep = init in pids  # else it has just ended
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            times = _stat(processes, pid)[11:15]  # utime, stime, and both of its children that have ended
            cpu_s += sum(map(int, times)) / _TICKS_PER_S
            for thread in _names(processes, f"{pid}/task"):
                waited_s += int(_content(processes, f"{pid}/task/{thread}/schedstat").split()[1]) / 1e9
                asleep = asleep and _stat(processes, f"{pid}/task/{thread}")[0] != b"R"
    return UsedTimes(cpu_s, cpu_s + waited_s, asleep)


def count_tasks(uid: int) -> int:
    """Processes and threads of `uid` on this machine, which RLIMIT_NPROC counts."""
    tasks = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{name}").st_uid == uid:
                tasks += len(os.listdir(f"/proc/{name}/task"))
    return tasks


def _descendants(processes: int) -> list[int]:
    """Of this process. `processes`: a descriptor of /proc."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir(processes)):
        with contextlib.suppress(OSError):  # it has ended
            state, parent = _stat(processes, name)[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _stat(processes: int, task: int | str) -> list[bytes]:
    """Its state, its parent and so on: the fields after the name, which may have spaces."""
    return _content(processes, f"{task}/stat").rpartition(b")")[2].split()


def _names(folder: int, path: str) -> list[str]:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _content(folder: int, path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(descriptor, 1 << 12)
    finally:
        os.close(descriptor)


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
