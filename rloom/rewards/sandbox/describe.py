"""Which protections a machine gives to a sandbox, in one line for the start of a run."""

from collections.abc import Mapping

from rloom.rewards.sandbox.client import Isolation, Sandbox
from rloom.rewards.sandbox.settings import Limits, Protections, SandboxJob


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
