"""How values go from the driver to workers and back: tensors as numpy arrays, large values in shared memory.

torch pickles a tensor by writing the whole storage that it is a view of, and copies it several times.
"""

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rloom.runtime.group import Stored

ARRAYS = frozenset({torch.bool, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64})
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def reduced(tensor: Tensor) -> Reduced:
    """A function and its arguments, that make the tensor again."""
    if tensor.dtype in ARRAYS and tensor.device.type == "cpu" and not tensor.requires_grad:
        return from_array, (tensor.numpy(),)
    found: Reduced = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:2]
    return found


def restored(parts: Reduced) -> Tensor:
    tensor: Tensor = parts[0](*parts[1])
    return tensor


def from_array(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # Ray's memory is read-only


class TensorPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduced(value) if type(value) is Tensor else NotImplemented


class SharedMemory(Stored):
    """A value in memory that processes of this machine map. A pickled one names the memory of its process, which has to
    exist until the receiver has loaded the message."""

    def __init__(self, value: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        message = io.BytesIO()
        TensorPickler(message, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(value)
        self.open(os.memfd_create("rloom"))
        with open(self.descriptor, "wb", closefd=False) as memory:
            sizes = [memory.write(buffer.raw()) for buffer in buffers]
            self.bytes = sum(sizes)  # of the arrays; what says where they are is behind them
            memory.write(pickle.dumps((message.getvalue(), sizes)))

    def open(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @property
    def file(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def __getstate__(self) -> tuple[str, int]:
        return self.file, self.bytes

    def __setstate__(self, state: tuple[str, int]) -> None:
        file, self.bytes = state
        self.open(os.open(file, os.O_RDONLY | os.O_CLOEXEC))

    def get(self) -> Any:
        # what a process writes to its arrays is its own: torch has no read-only tensors
        mapped = memoryview(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_COPY))
        pickled, sizes = pickle.loads(mapped[self.bytes :])
        ends = [0, *accumulate(sizes)]
        return pickle.loads(pickled, buffers=[mapped[start:stop] for start, stop in pairwise(ends)])
