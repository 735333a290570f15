"""Memory and CPU use of a process and its machine: read once per step, and before a run begins."""

import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 2**30
PEAK = "perf/max_memory_allocated_gb"  # of all workers, the largest counts


@dataclass(frozen=True)
class Machine:
    """The machine of a worker, at the worker's start."""

    node: str  # address
    process: int  # process id of the worker
    memory_gib: float  # available for new processes
    gpu: str | None = None  # the device's name
    gpu_free_gib: float = 0.0
    gpu_total_gib: float = 0.0

    @classmethod
    def of_this_process(cls, node: str) -> "Machine":
        if not torch.cuda.is_available():
            return cls(node, os.getpid(), free_bytes() / GIB)
        free, total = torch.cuda.mem_get_info()
        return cls(node, os.getpid(), free_bytes() / GIB, torch.cuda.get_device_name(), free / GIB, total / GIB)


class ProcessStats:
    """Memory and CPU use of one worker's process, as metrics."""

    def __init__(self, name: str) -> None:
        self.prefix = f"perf/{name.replace(' ', '_')}"
        self.last = time.monotonic(), cpu_seconds()

    def metrics(self) -> dict[str, float]:
        """`cores_used` is the average since the last call. PEAK is of the GPU, or of the process without one."""
        now = time.monotonic(), cpu_seconds()
        cores = (now[1] - self.last[1]) / max(now[0] - self.last[0], 1e-9)
        self.last = now
        found = {"resident_gb": resident_bytes() / GIB, "cores_used": cores}
        peak = peak_resident_bytes()
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            peak = torch.cuda.max_memory_allocated()
            found |= {"gpu_allocated_gb": peak / GIB, "gpu_memory_used": 1 - free / total}
        return {f"{self.prefix}/{name}": value for name, value in found.items()} | {PEAK: peak / GIB}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Resident memory of the process; on systems without /proc, its peak."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_bytes() -> int:
    """Memory of this machine that is available for new processes."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    line = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
