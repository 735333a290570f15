"""What the benchmarks share: the device, clocks, memory and tables."""

import gc
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rloom.runs.metrics import peak_memory_bytes

NEGLIGIBLE_GIB = 0.1


def pick_device() -> tuple[torch.device, torch.dtype]:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    return torch.device("cpu"), torch.float32


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return f"{name}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give back what nobody holds any more, and begin a new count of the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        left_gib = torch.cuda.memory_allocated(device) / 2**30
        if left_gib > NEGLIGIBLE_GIB:
            note(f"{left_gib:.1f} GiB are still held by what ran before; the next peak has them on top")


@dataclass
class Stopwatch:
    """Seconds by name; the device has finished when a clock stops."""

    device: torch.device
    seconds: dict[str, float]

    @classmethod
    def on(cls, device: torch.device) -> "Stopwatch":
        return cls(device, {})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        synchronise(self.device)
        started = time.perf_counter()
        yield
        synchronise(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def peak_gib(device: torch.device) -> float:
    """Of torch's allocator; on a CPU, of the process."""
    return peak_memory_bytes(device) / 2**30


def outside_gib(device: torch.device) -> float:
    """Held on the GPU beside torch's allocator: the native engine's cache, graphs, the context itself."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**30


def used_gib(device: torch.device) -> float:
    """In use on the whole GPU, by every process and allocator."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


def held_gib(device: torch.device) -> float | None:
    """What stays allocated between steps; a CPU does not say."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else None


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def note(text: str) -> None:
    """On the way: not part of the table."""
    print(text, file=sys.stderr, flush=True)
