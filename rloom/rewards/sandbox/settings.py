"""The settings of a sandbox, and the messages between the reward worker, the launcher and a program.

Standard library only, as everything that the launcher imports.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rloom.rewards.framing import framed, read_frame, write_all

FIRST_UID = 60_706  # systemd's list of uids leaves 60706 to 61183 unused
UIDS = 478


@dataclass(frozen=True)
class Limits:
    """Of one run of a program."""

    timeout_s: float  # wall time
    cpu_s: int  # of each process
    memory_mb: int  # address space of each process
    file_mb: int  # of a file; with namespaces, of the whole scratch folder
    processes: int  # with threads
    output_kb: int  # stdout, stderr and results together


@dataclass(frozen=True)
class Setup:
    """Sent once to a launcher."""

    limits: Limits
    namespaces: bool
    prefixes: tuple[str, ...]  # folders of the interpreter
    packages: tuple[str, ...]  # folders of packages that programs may import


@dataclass(frozen=True)
class Job:
    """One run of a program. `sources`: the first that compiles is executed."""

    sources: tuple[str, ...]
    prelude: str = ""  # executed before the program, in the same module
    module_name: str = "solution"  # "__main__" for a program that reads stdin
    stdin: str = ""
    tests: str = ""  # executed after the program; reports through __case__
    first_case: int = 0
    function: str | None = None  # called with each of `calls`
    calls: tuple[tuple[Any, ...], ...] = ()
    nonce: str = ""  # in each report, so that a program does not write one by accident


@dataclass(frozen=True)
class Run:
    """What a program did."""

    stopped: str | None  # the limit that it exceeded
    exit_code: int  # negative: the signal
    stdout: str
    stderr: str
    report: str  # a line of JSON for each result
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
    faults: Mapping[str, str] = field(default_factory=dict)  # protection -> why it is not there


def encode(message: Any) -> bytes:
    return framed(json.dumps(message).encode())


def send(descriptor: int, message: Any) -> None:
    write_all(descriptor, encode(message))


def receive(read: Callable[[int], bytes]) -> Any:
    return json.loads(read_frame(read))


def as_message(value: Setup | Job | Run | Protections) -> dict[str, Any]:
    return asdict(value)


def setup_of(message: Mapping[str, Any]) -> Setup:
    return Setup(
        Limits(**message["limits"]), message["namespaces"], tuple(message["prefixes"]), tuple(message["packages"])
    )
