"""Machines of a Ray cluster for one run: addresses, ports, and `ray start` as a child process."""

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from rloom.errors import ConfigError, WorkerError
from rloom.extras import install_command
from rloom.interrupts import sigterm_blocked

NODE = "rloom_node_"  # prefix of the Ray resource that identifies a machine of the run by its rank
HEAD_START_S = 180.0  # Ray starts several processes, which takes long on busy cores
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
# prctl(PR_SET_PDEATHSIG): a head that outlives its run would keep the port, and machines of the next run would join it.
# Ray's own processes end with `ray start` in the same way.
END_WITH_PARENT = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); os.execv(sys.argv[1], sys.argv[1:])"
)


def machine_marks(machines: Iterable[Mapping[str, float]]) -> list[str]:
    """The resources that number the machines of a run, given the resources of each, in the order of the numbers."""
    marks = {name for machine in machines for name in machine if name.startswith(NODE)}
    return sorted(marks, key=lambda mark: int(mark.removeprefix(NODE)))


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


def own_addresses() -> dict[str, str]:
    """IPv4 address by network interface; empty on systems other than Linux."""
    found: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address."""
    return next((name for name, own in own_addresses().items() if own == address), None)


def check_head_address(address: str) -> None:
    """Check that the address belongs to this machine and its port is free."""
    host, port = address.rsplit(":", 1)
    if not can_bind(host):
        own = ", ".join(own_addresses().values()) or "unknown"
        raise ConfigError(
            f"trainer.master_addr={host}: this machine, trainer.node_rank=0, does not have that address (its own: "
            f"{own}); start trainer.node_rank=0 on the machine that has it, or use one of these on every machine"
        )
    if reachable(address):
        raise ConfigError(
            f"trainer.master_port={port}: another process listens on {address}; end it, or choose another port on "
            "every machine"
        )


def can_bind(host: str) -> bool:
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError(
            f"trainer.master_addr={host}: the name cannot be resolved ({error.strerror}); use the address of machine 0"
        ) from error
    for family, kind, protocol, _, place in places:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
            return True
    return False


@contextmanager
def head_node(address: str, *, cpus: int, gpus: int) -> Iterator[None]:
    """Run Ray's head on this machine while the context is open."""
    host, port = address.rsplit(":", 1)
    with ray_process(["--head", f"--node-ip-address={host}", f"--port={port}"], 0, cpus, gpus) as process:
        wait_until(
            lambda: reachable(address) or fail_if_ended(process),
            HEAD_START_S,
            f"Ray's head at {address} does not answer",
        )
        yield


@contextmanager
def ray_process(how: list[str], node: int, cpus: int, gpus: int) -> Iterator["subprocess.Popen[bytes]"]:
    """`ray start --block` as a child process: it ends with this process, and its own children end with it."""
    command = [
        ray_command(), "start", *how, "--block", "--disable-usage-stats", f"--num-cpus={cpus}", f"--num-gpus={gpus}",
        f"--resources={json.dumps({f'{NODE}{node}': 1})}",
    ]  # fmt: skip
    if "--head" in how:
        command += ["--include-dashboard=false", "--no-monitor"]  # the monitor is that of the autoscaler
    if sys.platform.startswith("linux"):
        command = [sys.executable, "-P", "-c", END_WITH_PARENT, *command]
    with sigterm_blocked():  # a scheduler's SIGTERM would end the cluster before the driver has finished its step
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ.copy(), start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # also its child processes; workers end when their raylet has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def ray_command() -> str:
    beside = Path(sys.executable).with_name("ray")  # of this Python environment, activated or not
    found = str(beside) if beside.is_file() else shutil.which("ray")
    if found is None:
        raise ConfigError(no_ray())
    return found


def no_ray() -> str:
    return (
        "trainer.nnodes above 1, trainer.backend=ray and an existing cluster need Ray, which is not installed: "
        f"{install_command('ray')}"
    )


def fail_if_ended(process: "subprocess.Popen[bytes]", unless: Callable[[], bool] = lambda: False) -> bool:
    if process.poll() is None or unless():
        return False
    text = process.stderr.read().decode(errors="replace") if process.stderr is not None else ""
    lines = [line for line in text.splitlines() if line.strip()]  # the last line of a traceback is the error
    raise WorkerError(f"`ray start` ended with {process.returncode}: {lines[-1] if lines else 'it printed nothing'}")


def wait_until(done: Callable[[], bool], timeout_s: float, otherwise: str) -> float:
    """Wait, and return the seconds it took."""
    started = time.monotonic()
    while not done():
        if time.monotonic() - started > timeout_s:
            raise WorkerError(otherwise)
        time.sleep(0.2)
    return time.monotonic() - started
