"""The machine: interpreter, GPUs as the driver lists them, a C compiler."""

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

DRIVER_LIMIT_S = 20.0


@dataclass(frozen=True)
class HostMachine:
    python: str
    system: str
    cpus: int
    gpus: tuple[str, ...]  # name and memory, by nvidia-smi
    driver: str | None
    driver_fault: str | None  # of nvidia-smi, where it exists and fails
    compiler: str | None


def examine_machine() -> HostMachine:
    gpus, driver, fault = nvidia_gpus()
    return HostMachine(
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        gpus=gpus,
        driver=driver,
        driver_fault=fault,
        compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
    )


def nvidia_gpus() -> tuple[tuple[str, ...], str | None, str | None]:
    """(GPUs, driver version, why they cannot be listed)"""
    command = shutil.which("nvidia-smi")
    if command is None:
        return (), None, None
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), None, f"nvidia-smi: {error}"
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    if done.returncode or not rows:
        first = (done.stdout + done.stderr).strip().splitlines()[:1] or ["no output"]
        return (), None, f"nvidia-smi: {first[0]}"
    return tuple(f"{name}, {memory}" for name, memory, _ in rows), rows[0][2], None
