"""Tensors in memory that another process of the same machine opens: CUDA IPC, or a named block of host memory.

A handle is opened once: torch counts the openings, and frees the memory of the sender after the last one.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rloom.engines.distributed import NamedGroup

DEVICE = 6  # place of the device's index in the arguments of torch's rebuild_cuda_tensor
ALLOWED = ("torch", "builtins", "collections", "multiprocessing")  # modules of what a handle is made of

T = TypeVar("T")
ATTEMPTS = 20
Reduced = tuple[Callable[..., Tensor], tuple[Any, ...]]


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def reduced(tensor: Tensor) -> Reduced:
    """A function and its arguments, which make the tensor in another process."""
    function, arguments = reduce_tensor(tensor)
    return function, tuple(arguments)


def with_uuid(tensor: Tensor) -> Reduced:
    """The same with the GPU's UUID: the processes may number their GPUs in other ways."""
    function, arguments = reduced(tensor)
    if tensor.is_cuda:
        arguments = (*arguments[:DEVICE], gpu_uuid(tensor.device), *arguments[DEVICE + 1 :])
    return function, arguments


class Pickler(ForkingPickler):
    """ForkingPickler with handles that have the GPU's UUID."""

    def reducer_override(self, value: Any) -> Any:
        return with_uuid(value) if isinstance(value, Tensor) else NotImplemented


def dumps(value: Any, kind: type[ForkingPickler] = Pickler) -> bytes:
    def dump() -> bytes:
        buffer = io.BytesIO()
        kind(buffer).dump(value)
        return buffer.getvalue()

    with named_memory():
        return retried(dump)


def retried(work: Callable[[], T]) -> T:
    """On a busy machine the process that manages torch's named memory exceeds its fixed limit of a second."""
    for _ in range(ATTEMPTS - 1):
        try:
            return work()
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
    return work()


@contextmanager
def named_memory() -> Iterator[None]:
    """Host memory by name, which any process can open; torch's default passes file descriptors to child processes."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class HandleUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ALLOWED or name in ("eval", "exec", "compile", "__import__", "getattr"):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor's handle")
        return super().find_class(module, name)


def loads(data: bytes) -> Any:
    return HandleUnpickler(io.BytesIO(data)).load()


def opened(handle: bytes, device: torch.device) -> Tensor:
    function, arguments = loads(handle)
    if device.type == "cuda":
        arguments = (*arguments[:DEVICE], index_of(arguments[DEVICE]), *arguments[DEVICE + 1 :])
    tensor: Tensor = retried(lambda: function(*arguments))
    return tensor


def index_of(uuid: str) -> int:
    found = [index for index in range(torch.cuda.device_count()) if gpu_uuid(torch.device("cuda", index)) == uuid]
    if not found:
        raise RuntimeError(
            f"the GPU {uuid} of the trainer is not visible here: actor_rollout_ref.rollout.server.weight_transfer="
            "shared needs a server on the trainer's GPU; use collective"
        )
    return found[0]


class SharedChannel:
    """A channel for processes on one GPU, which NCCL does not connect: handles go over gloo, and receivers copy."""

    def __init__(self, control: NamedGroup, device: torch.device) -> None:
        self.control, self.device, self.sends = control, device, control.sends

    def broadcast(self, tensor: Tensor) -> None:
        if self.sends:
            handles = [dumps(with_uuid(tensor)) for _ in range(self.control.ranks - 1)]  # opened once each
            self.exchange(pickle.dumps(handles))
        else:
            handle = loads(self.exchange(b""))[self.control.rank - 1]
            tensor.copy_(opened(handle, tensor.device))
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)  # the sender reuses the memory after the barrier
        self.control.barrier()

    def exchange(self, message: bytes) -> bytes:
        length = torch.tensor([len(message)])
        self.control.broadcast(length)
        text = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(int(length)).byte()
        self.control.broadcast(text)
        return bytes(text.numpy())

    def close(self) -> None:
        self.control.close()
