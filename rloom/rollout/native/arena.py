"""Device memory at a fixed virtual address, whose physical memory can be freed and allocated again.

CUDA graphs hold addresses. So that the key-value cache can be freed while training and the graphs stay valid, its
address range is reserved once, and physical memory is mapped to it when needed (CUDA's virtual memory management, which
torch's allocator does not offer for a single tensor).
"""

import ctypes
import sys
from functools import cache

import torch
from torch import Tensor

from rloom.errors import ModelError

PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, ..._READWRITE
OUT_OF_MEMORY = 2


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


@cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ModelError(f"no NVIDIA driver: {error}; use actor_rollout_ref.rollout.name=hf") from error


def call(name: str, *arguments: object) -> None:
    code = getattr(driver(), name)(*arguments)
    if code == OUT_OF_MEMORY:
        raise torch.cuda.OutOfMemoryError(f"{name}: the GPU has not enough free memory")
    if code:
        raise ModelError(f"{name} failed with CUDA error {code}")


class Arena:
    """`size` bytes at a fixed address of a CUDA device, without physical memory until `map`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.handle: ctypes.c_uint64 | None = None
        self.address = ctypes.c_uint64()
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        torch.zeros(1, device=device)  # creates the CUDA context
        self.properties = Properties(type=PINNED, location=Location(ON_DEVICE, self.index))
        granularity = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self.properties), 0)
        self.size = -(-size // granularity.value) * granularity.value
        call("cuMemAddressReserve", ctypes.byref(self.address), ctypes.c_size_t(self.size), 0, ctypes.c_uint64(0), 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address.value, False), "version": 3}

    @property
    def mapped(self) -> bool:
        return self.handle is not None

    def map(self) -> None:
        if self.mapped:
            return
        self.handle, size = self.create(), ctypes.c_size_t(self.size)
        call("cuMemMap", self.address, size, ctypes.c_size_t(0), self.handle, ctypes.c_uint64(0))
        access = Access(Location(ON_DEVICE, self.index), READ_WRITE)
        call("cuMemSetAccess", self.address, size, ctypes.byref(access), ctypes.c_size_t(1))

    def create(self) -> ctypes.c_uint64:
        handle = ctypes.c_uint64()
        arguments = ctypes.byref(handle), ctypes.c_size_t(self.size), ctypes.byref(self.properties), ctypes.c_uint64(0)
        try:
            call("cuMemCreate", *arguments)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()  # free the blocks that torch's allocator caches
            try:
                call("cuMemCreate", *arguments)
            except torch.cuda.OutOfMemoryError as error:
                raise ModelError(
                    f"the GPU has no {self.size / 2**30:.1f} GiB left for the key-value cache; "
                    "lower actor_rollout_ref.rollout.gpu_memory_utilization"
                ) from error
        return handle

    def unmap(self) -> None:
        if self.handle is None:
            return
        torch.cuda.synchronize(self.index)
        call("cuMemUnmap", self.address, ctypes.c_size_t(self.size))
        call("cuMemRelease", self.handle)
        self.handle = None

    def tensor(self) -> Tensor:
        """All bytes, which may be accessed only while they are mapped."""
        return torch.as_tensor(self, device=torch.device("cuda", self.index))

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit the driver frees it, and torch may be unloaded already
            self.close()

    def close(self) -> None:
        self.unmap()
        if self.address.value:
            call("cuMemAddressFree", self.address, ctypes.c_size_t(self.size))
            self.address = ctypes.c_uint64()
