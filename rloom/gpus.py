"""The GPUs that this process may use, by NVIDIA's management library (NVML). No torch: its import takes seconds."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHOICE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
# devices of GPUs that NVML does not count: of AMD, of Windows below its Linux, and of NVIDIA's boards
UNCOUNTED = ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")


@dataclass(frozen=True)
class Gpu:
    number: int
    uuid: str | None = None  # None: NVML is not there
    memory_bytes: int | None = None  # None: unknown, or divided into MIG instances


def visible_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    return choose(present_gpus(), environment.get(CHOICE))


def has_no_gpu(environment: Mapping[str, str]) -> bool:
    """Certainly: torch, which is not imported yet, will see none either."""
    return not visible_gpus(environment) and not has_uncounted_gpu()


def has_uncounted_gpu() -> bool:
    return any(Path(device).exists() for device in UNCOUNTED)


def device_names(environment: Mapping[str, str]) -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES for each visible GPU alone."""
    count, names = len(visible_gpus(environment)), environment.get(CHOICE)
    return [*map(str, range(count))] if names is None else [name.strip() for name in names.split(",")][:count]


def choose(present: Sequence[Gpu], names: str | None) -> list[Gpu]:
    """As CUDA reads CUDA_VISIBLE_DEVICES: numbers, or beginnings of UUIDs; the first that does not exist ends it."""
    if names is None:
        return list(present)
    found: list[Gpu] = []
    for name in (part.strip() for part in names.split(",")):
        if name.startswith("MIG-"):
            found.append(Gpu(len(found), name))
            continue
        by_number = [gpu for gpu in present if name == str(gpu.number)]
        by_uuid = [gpu for gpu in present if name.startswith("GPU-") and (gpu.uuid or name).startswith(name)]
        match = [gpu for gpu in by_number or by_uuid if gpu not in found]
        if not match:
            break
        found.append(match[0])
    return found


def smallest_memory(environment: Mapping[str, str]) -> int | None:
    """Bytes of the visible GPU with the least memory; None: no GPU, or its memory is unknown."""
    sizes = [gpu.memory_bytes for gpu in visible_gpus(environment)]
    known = [size for size in sizes if size is not None]
    # CUDA numbers the fastest GPU first unless ORDER is set, NVML by bus: of unequal ones it is unknown which is meant
    in_doubt = len({gpu.memory_bytes for gpu in present_gpus()}) > 1 and environment.get(ORDER) != "PCI_BUS_ID"
    return min(known) if known and len(known) == len(sizes) and not in_doubt else None


class NvmlMemory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@cache
def present_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine or container; without NVML, by the driver's device files."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return tuple(Gpu(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))
    if nvml.nvmlInit_v2():
        return ()
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    found = tuple(read_gpu(nvml, number) for number in range(count.value))
    nvml.nvmlShutdown()
    return found


def read_gpu(nvml: ctypes.CDLL, number: int) -> Gpu:
    handle, uuid, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), NvmlMemory()
    mig, later = ctypes.c_uint(), ctypes.c_uint()
    nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
    divided = not nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(mig), ctypes.byref(later)) and mig.value == 1
    unknown = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0 or divided
    return Gpu(number, uuid.value.decode(), None if unknown else memory.total)
