"""A sandbox as a rule uses it: start the launcher, run programs, end it, describe its protections."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from rloom.errors import RewardError
from rloom.rewards.sandbox import namespaces
from rloom.rewards.sandbox.settings import (
    Limits,
    Protections,
    SandboxJob,
    SandboxRun,
    SandboxSetup,
    Suite,
    as_json,
    encode,
    receive,
)

Isolation = Literal["auto", "required", "none"]

START_LIMIT_S = 60.0
END_GRACE_S = 30.0  # over the time limit of a program: the launcher ends it and removes its files
_OWN_CODE = str(Path(__file__).parents[3])
_START = "import sys; sys.path.insert(0, sys.argv[1]); from rloom.rewards.sandbox.launcher import main; main()"
_REASON_LENGTH = 300  # characters
_PACKAGES = ("numpy", "numpy.libs")  # many published solutions import numpy


class SandboxError(RewardError):
    """The sandbox does not work, so no program was executed: not the fault of the program."""


@dataclass(frozen=True)
class SandboxOutcome:
    """What a program did, and what its tests reported (see `tests.py`)."""

    run: SandboxRun
    reports: tuple[Mapping[str, Any], ...] = ()

    @property
    def error(self) -> str | None:
        """Why the program ended early: a limit, an exception outside the tests, a signal or an exit code."""
        if self.run.stopped is not None:
            return self.run.stopped
        errors = [report["error"] for report in self.reports if "case" not in report and "error" in report]
        if errors:
            return str(errors[-1])
        if self.run.exit_code < 0:
            return _ended(self.run.exit_code)
        return f"exit code {self.run.exit_code}" if self.run.exit_code else None


def _ended(exit_code: int) -> str:
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal, or an exit code of its own
        return f"ended by signal {-exit_code}"


class Sandbox:
    """Runs programs one after another. It is started on first use, and again after it failed."""

    def __init__(self, limits: Limits, isolation: Isolation) -> None:
        self._limits, self._isolation = limits, isolation
        self._launcher: _Launcher | None = None

    @property
    def protections(self) -> Protections:
        return self._started().protections

    def run(self, job: SandboxJob, tests: Suite | None = None) -> SandboxOutcome:
        launcher = self._started()
        try:
            limit_s = (job.limits or self._limits).timeout_s + END_GRACE_S
            reply = launcher.run(job, tests, limit_s)
        except (OSError, EOFError) as error:
            self.close()
            raise SandboxError(f"the sandbox's launcher failed ({type(error).__name__}: {error})") from error
        if "fault" in reply:
            raise SandboxError(f"the program could not be confined and was not executed: {reply['fault']}")
        run = SandboxRun(**reply)
        if tests is None:
            # written by the program itself: any text, and only ever a reason for 0
            return SandboxOutcome(run, ({"error": run.report[:_REASON_LENGTH]},) if run.report else ())
        return SandboxOutcome(run, tuple(_reports(run.report)))

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = None

    def _started(self) -> "_Launcher":
        if self._launcher is None:
            self._launcher = self._start()
        return self._launcher

    def _start(self) -> "_Launcher":
        if sys.platform != "linux":
            raise SandboxError(
                f"code rewards (reward_model.sandbox) need Linux, this system is {sys.platform}; use a Linux container"
            )
        if self._isolation == "none":
            return _Launcher(self._setup(with_namespaces=False))
        try:
            return _Launcher(self._setup(with_namespaces=True))
        except SandboxError as error:
            if self._isolation == "required":
                raise SandboxError(
                    f"reward_model.sandbox.isolation=required: this machine does not allow the namespaces that a "
                    f"sandbox needs ({error}). Allow unprivileged user namespaces (docker run --security-opt "
                    "seccomp=unconfined --security-opt apparmor=unconfined), or use reward_model.sandbox.isolation=auto"
                ) from error
            return self._start_without_namespaces(str(error))

    def _start_without_namespaces(self, fault: str) -> "_Launcher":
        launcher = _Launcher(self._setup(with_namespaces=False))
        protections = launcher.protections
        if not (protections.landlock and protections.seccomp):
            launcher.close()
            faults = "; ".join(
                f"{name}: {reason}" for name, reason in {"namespaces": fault, **protections.faults}.items()
            )
            raise SandboxError(
                "reward_model.sandbox.isolation=auto: this machine has no namespaces, and not both of Landlock (files) "
                f"and seccomp (network) ({faults}). Generated code could read and write the files of this user and use "
                "the network. Allow unprivileged user namespaces (docker run --security-opt seccomp=unconfined "
                "--security-opt apparmor=unconfined), or run it all the same with reward_model.sandbox.isolation=none"
            )
        launcher.protections = replace(protections, faults={"namespaces": fault, **protections.faults})
        return launcher

    def _setup(self, *, with_namespaces: bool) -> SandboxSetup:
        prefixes = tuple(dict.fromkeys((sys.base_prefix, sys.base_exec_prefix)))
        return SandboxSetup(self._limits, with_namespaces, prefixes, tuple(_packages()))


class _Launcher:
    """The launcher's process. The constructor waits until it is ready."""

    protections: Protections

    def __init__(self, setup: SandboxSetup) -> None:
        self._socket, theirs = socket.socketpair()
        # without LD_LIBRARY_PATH some builds of Python do not find their library
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c", _START, _OWN_CODE],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,  # it outlives a kill of the reward worker by a moment, to remove its files
            )
        try:
            reply = self.exchange(setup, START_LIMIT_S)
            if "pid" in reply:
                reply = self.exchange(_map_ids(reply["pid"], reply["uid"]), START_LIMIT_S)
        except (OSError, EOFError) as error:
            reply = {"fault": f"the launcher ended ({type(error).__name__}: {error})"}
        if "fault" in reply:
            self.close()
            raise SandboxError(reply["fault"])
        self.protections = Protections(**reply)

    def exchange(self, message: Any, limit_s: float) -> dict[str, Any]:
        self._socket.settimeout(limit_s)
        self._socket.sendall(encode(message))
        return self._reply()

    def run(self, job: SandboxJob, tests: Suite | None, limit_s: float) -> dict[str, Any]:
        """Job and tests travel as memory files, which are read by the processes that need them."""
        self._socket.settimeout(limit_s)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(_memory_file(part)) for part in (job, tests) if part is not None]
            socket.send_fds(self._socket, [b"j"], [file.fileno() for file in files])
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        return receive(self._socket.recv)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_GRACE_S)
            return
        self._process.kill()
        self._process.wait()


def _memory_file(content: SandboxJob | Suite) -> BinaryIO:
    file = open(os.memfd_create("job"), "w+b")  # noqa: SIM115
    file.write(as_json(content))
    file.seek(0)  # with a flush: the receiver reads from the beginning
    return file


def _map_ids(pid: int, uid: int) -> dict[str, Any]:
    try:
        return {"other_uid": namespaces.map_ids(pid, uid)}
    except OSError as error:
        return {"fault": str(error)}


def _packages() -> Iterator[str]:
    """Folders of the packages that programs may import, where they are installed."""
    spec = importlib.util.find_spec(_PACKAGES[0])
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parents[1]
        yield from (str(folder / name) for name in _PACKAGES if (folder / name).is_dir())


def _reports(text: str) -> Iterator[Mapping[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the last line of a killed process may be incomplete
            yield json.loads(line)


def check_sandbox(limits: Limits, isolation: Isolation) -> str:
    """Run a program, and describe the protections. SandboxError if programs cannot be run."""
    sandbox = Sandbox(limits, isolation)
    try:
        sandbox.run(SandboxJob(("pass",)))
        return description(sandbox.protections)
    finally:
        sandbox.close()


def description(protections: Protections) -> str:
    given, missing = _given(protections), _missing(protections)
    line = f"Generated code runs in a sandbox with {', '.join(given)}."
    if missing:
        line += f" Not protected on this machine: {'; '.join(missing)}."
    if protections.faults:
        line += f" ({_reasons(protections.faults)})"
    return line


def _given(protections: Protections) -> list[str]:
    given = ["time, memory, file, process and output limits"]
    if protections.namespaces:
        given.append("user, mount, pid, network, ipc and uts namespaces")
    if protections.uid is not None:
        given.append("a uid of its own")
    if protections.seccomp:
        given.append("a seccomp filter (no sockets)")
    if protections.landlock:
        given.append("Landlock (reads the interpreter, writes its scratch folder)")
    if not protections.fork:
        given.append("no child processes")
    if protections.memory:
        given.append("one memory limit for all processes of a program")
    return given


def _missing(protections: Protections) -> list[str]:
    missing = []
    own_uid = protections.uid is not None
    if not protections.namespaces and not protections.landlock:
        whose = "all users may" if own_uid else "this user may"
        missing.append(f"reading and writing the files that {whose} read and write")
        if not own_uid:
            missing.append("reading the environment of this user's processes")
    if not protections.namespaces and not protections.seccomp:
        missing.append("the network")
        if not own_uid:
            missing.append("signals to this user's processes")
    if not protections.namespaces:
        missing.append("the number of files in the scratch folder")
    if not protections.memory and protections.fork:
        missing.append("the memory of several processes together (each has the limit)")
    return missing


def _reasons(faults: Mapping[str, str]) -> str:
    return "; ".join(f"no {name}: {reason}" for name, reason in faults.items())
