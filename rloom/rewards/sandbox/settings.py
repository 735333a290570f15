"""The settings of a sandbox, and the messages between the reward worker, the launcher and a program.

Standard library only, as everything that the launcher imports.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rloom.rewards.framing import framed, read_frame, write_all

FIRST_UID = 60_706  # systemd's list of uids leaves 60706 to 61183 unused
UIDS = 478


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program."""

    timeout_s: float  # wall time
    cpu_s: float  # its own time: wall time in which it does not wait for a processor; processor time of all processes
    memory_mb: int  # address space of each process
    file_mb: int  # of a file; with namespaces, of the whole scratch folder
    processes: int  # with threads
    output_kb: int  # stdout, stderr and results together; also of one value that a function returns

    def within(self, cpu_s: float) -> "Limits":
        return replace(self, cpu_s=min(cpu_s, self.cpu_s))


@dataclass(frozen=True)
class SandboxSetup:
    """Sent once to a launcher."""

    limits: Limits
    namespaces: bool
    prefixes: tuple[str, ...]  # folders of the interpreter
    packages: tuple[str, ...]  # folders of packages that programs may import


@dataclass(frozen=True)
class SandboxJob:
    """One run of a program. `sources`: the first that compiles is executed."""

    sources: tuple[str, ...]
    prelude: str = ""  # executed before the program, in the same module
    module_name: str = "solution"  # "__main__" for a program that reads stdin
    stdin: str = ""
    limits: Limits | None = None  # None: those of the sandbox


@dataclass(frozen=True)
class Suite:
    """What the process of the tests reads, and neither the program nor a process that the program comes from.

    Either `source`, code that reports through `__case__`, or `function`, which is called with each of `calls`.
    """

    first: int  # earlier tests are left out
    go_on: bool = True  # after a test that failed
    given: str = ""  # executed first: definitions of the row
    names: tuple[str, ...] = ()  # functions and classes that the program defines
    source: str = ""
    function: str | None = None
    calls: tuple[tuple[Any, ...], ...] = ()
    outputs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class SandboxRun:
    """What a program did."""

    stopped: str | None  # the limit that it exceeded
    out_of_time: bool  # whether it exceeded a time limit
    exit_code: int  # negative: the signal
    stdout: str
    stderr: str
    report: str  # a line of JSON for each test; without tests, the reason of an early end
    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Protections:
    """What a launcher has set up."""

    namespaces: bool
    uid: int | None  # of the programs, where it differs from that of the reward worker
    seccomp: bool
    landlock: bool
    fork: bool  # whether programs may start processes
    memory: bool  # one memory limit for all processes of a program
    faults: Mapping[str, str] = field(default_factory=dict)  # protection -> why it is not there


def as_json(message: Any) -> bytes:
    """A dict, or one of the classes above."""
    return json.dumps(message, default=vars).encode()


def encode(message: Any) -> bytes:
    return framed(as_json(message))


def send(descriptor: int, message: Any) -> None:
    write_all(descriptor, encode(message))


def receive(read: Callable[[int], bytes]) -> Any:
    return json.loads(read_frame(read))


def setup_of(message: Mapping[str, Any]) -> SandboxSetup:
    return SandboxSetup(
        Limits(**message["limits"]), message["namespaces"], tuple(message["prefixes"]), tuple(message["packages"])
    )
