"""Machines that form a cluster for one run: the first starts Ray's head, the others join it and leave with it."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rloom.errors import ConfigError, WorkerError
from rloom.extras import install_command

NODE = "rloom_node_"  # the resource that marks a machine of the run, with its number
SIOCGIFADDR = 0x8915  # Linux: the address of an interface
LOOKS_APART_S = 1.0
GONE_AFTER = 3  # looks in a row that do not find the head
LEAVING_S = 5.0


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this address; None where the system does not say (not Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            question = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # one without an address
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, question)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def agree_on_token(address: str) -> None:
    """Machines of one cluster need one token, and each would make up its own. Before Ray is imported: it looks then.

    This one keeps runs apart, not intruders out: on a network that others use, set RAY_AUTH_TOKEN to a secret.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") == "token":
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ.setdefault("RAY_AUTH_TOKEN", hashlib.sha256(f"rloom {address}".encode()).hexdigest())


@contextmanager
def head_node(address: str, *, cpus: int, gpus: int) -> Iterator[None]:
    """Ray's head on this machine, for as long as it lasts."""
    host, port = address.rsplit(":", 1)
    if reachable(address):
        raise ConfigError(
            f"trainer.master_port={port}: something listens on {address} already; end it, or choose another port "
            "on every machine"
        )
    with ray_process(["--head", f"--node-ip-address={host}", f"--port={port}"], 0, cpus, gpus) as process:
        wait_until(lambda: reachable(address) or fail_if_ended(process), 60, f"Ray's head at {address} does not answer")
        yield


def lend_this_machine(
    address: str, node: int, *, cpus: int, gpus: int, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Join the head and stay until it is gone."""
    agree_on_token(address)
    say(f"Machine {node} joins the run at {address}")
    waited = wait_until(lambda: reachable(address), timeout_s, f"nobody answers at {address} after {timeout_s:.0f} s")
    if waited > LOOKS_APART_S:
        say(f"Machine 0 answers after {waited:.0f} s")
    with ray_process([f"--address={address}"], node, cpus, gpus) as process:
        missing = 0
        while missing < GONE_AFTER:
            time.sleep(LOOKS_APART_S)
            fail_if_ended(process, unless=lambda: not reachable(address))
            missing = 0 if reachable(address) else missing + 1
    say(f"The run at {address} has ended; machine {node} leaves")


@contextmanager
def ray_process(how: list[str], node: int, cpus: int, gpus: int) -> Iterator["subprocess.Popen[bytes]"]:
    """`ray start` in the foreground of a child: what it started ends with it."""
    command = [
        ray_command(), "start", *how, "--block", "--disable-usage-stats", f"--num-cpus={cpus}", f"--num-gpus={gpus}",
        f"--resources={json.dumps({f'{NODE}{node}': 1})}",
    ]  # fmt: skip
    if "--head" in how:
        command.append("--include-dashboard=false")
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ.copy(), start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVING_S)
        with suppress(ProcessLookupError):  # whatever of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def ray_command() -> str:
    beside = Path(sys.executable).with_name("ray")  # of the environment that runs us, activated or not
    found = str(beside) if beside.is_file() else shutil.which("ray")
    if found is None:
        raise ConfigError(no_ray("trainer.nnodes"))
    return found


def no_ray(key: str) -> str:
    return f"{key}: more than one worker needs Ray, which is not installed: {install_command('ray')}"


def fail_if_ended(process: "subprocess.Popen[bytes]", unless: Callable[[], bool] = lambda: False) -> bool:
    if process.poll() is None or unless():
        return False
    said = process.stderr.read().decode(errors="replace").strip() if process.stderr is not None else ""
    raise WorkerError(f"`ray start` ended with {process.returncode}: {said[-2000:] or 'it said nothing'}")


def wait_until(done: Callable[[], bool], timeout_s: float, otherwise: str) -> float:
    """Seconds it took."""
    started = time.monotonic()
    while not done():
        if time.monotonic() - started > timeout_s:
            raise WorkerError(otherwise)
        time.sleep(0.2)
    return time.monotonic() - started
