"""The policy's weights on their way to rollout engines that hold a copy of the model.

Workers that train and generate load the weights of their own engine. With rollout engines on other workers, rank 0 of
the actor broadcasts a manifest (version, names, shapes, dtypes), then the tensors in that order. Engines on a copy of
the actor's model start without weights: the first sync sends all of them, frozen ones and buffers too, and later ones
what is trained. After each sync the fingerprints of what the engine holds are compared with those of the actor's
parameters, where the engine's memory can be read.

To another process of the same machine, tensors go as handles of shared memory: CUDA IPC, or a named block of host
memory. A handle is opened once: torch counts the openings, and frees the memory of the sender after the last one.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rloom.engines.base import Engine, TensorSpec, dtype_name
from rloom.engines.distributed import NamedGroup
from rloom.engines.fingerprint import SyncComparison, listed
from rloom.errors import ModelError

Weights = Iterator[tuple[str, Tensor]]


class WeightLoader(Protocol):
    """A rollout engine, as far as weights are concerned."""

    def load_weights(self, weights: Weights, version: int) -> None: ...

    def held_weights(self) -> Mapping[str, Tensor] | None:
        """The tensors that it computes with, by the trainer's names. None: in a layout of its own, or elsewhere."""


class Channel(Protocol):
    """Broadcasts tensors from its first member to the others."""

    @property
    def device(self) -> torch.device: ...

    @property
    def sends(self) -> bool: ...

    def broadcast(self, tensor: Tensor) -> None:
        """Filled in place on the receivers."""


@dataclass(frozen=True)
class Manifest:
    """What is about to be sent."""

    version: int
    tensors: list[TensorSpec]

    def send(self, channel: Channel) -> None:
        text = torch.frombuffer(bytearray(json.dumps([self.version, self.tensors]).encode()), dtype=torch.uint8)
        channel.broadcast(torch.tensor([len(text)], device=channel.device))
        channel.broadcast(text.to(channel.device))

    @classmethod
    def receive(cls, channel: Channel) -> "Manifest":
        length = torch.zeros(1, dtype=torch.long, device=channel.device)
        channel.broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8, device=channel.device)
        channel.broadcast(text)
        version, tensors = json.loads(bytes(text.tolist()))
        return cls(version, [TensorSpec(*tensor) for tensor in tensors])


class WeightSync:
    """One worker's part in it. All workers that have one call `sync` together."""

    def __init__(
        self,
        source: Engine | None,
        target: WeightLoader | None,
        channel: Channel | None = None,
        *,
        compares: bool = True,  # False: the engine's weights cannot be read, on any of the workers
        setting: str = "",  # that chose the rollout engine, for error messages
    ) -> None:
        self.source = source  # trains on this worker; None where `target` reads the source's own parameters
        self.target = target  # generates on this worker
        self.channel = channel  # between workers that train and workers that generate
        self.compares, self.setting, self.comparison = compares, setting, SyncComparison()

    @torch.no_grad()
    def sync(self, version: int, frozen: bool = False) -> None:
        """`frozen`: what never changes is sent, too, to engines that were created without weights."""
        if self.channel is not None and not self.channel.sends:
            self.receive(version, self.channel)
            return
        if self.source is None:
            assert self.target is not None
            self.target.load_weights(iter(()), version)
            return
        specs = self.source.manifest(frozen)
        if not specs:
            raise ModelError(
                f"{self.setting}: the actor has no parameter that is trained, so none is sent to the rollout engine; "
                "its answers would stay those of the model at the start. Check actor_rollout_ref.model.target_modules"
            )
        weights = self.source.weights(frozen)
        if self.channel is not None:
            self.send(weights, Manifest(version, specs), self.channel)
        elif self.target is not None:
            self.target.load_weights(weights, version)
        else:  # a rank that only takes part in gathering
            for _ in weights:
                pass
        if self.compares:
            self.compare(specs, self.source.fingerprints(frozen), version)  # by all ranks of the actor together

    def compare(self, specs: list[TensorSpec], sums_P2: Tensor, version: int) -> None:
        if self.channel is not None:
            self.channel.broadcast(sums_P2.to(self.channel.device))
        elif self.target is not None:
            self.check(self.target, specs, sums_P2, version)

    def send(self, weights: Weights, manifest: Manifest, channel: Channel) -> None:
        manifest.send(channel)
        left = iter(manifest.tensors)
        for name, tensor in weights:
            if (name, [*tensor.shape]) != next(left)[:2]:  # the receivers would take it for another parameter
                raise ModelError(f"the actor sends {name} out of the order in which it has announced its parameters")
            channel.broadcast(tensor.to(channel.device).contiguous())
        if missing := [spec.name for spec in left]:  # the receivers wait for them
            raise ModelError(f"the actor did not send {listed(missing, len(manifest.tensors))}")

    def receive(self, version: int, channel: Channel) -> None:
        manifest = Manifest.receive(channel)
        assert self.target is not None and manifest.version == version
        self.target.load_weights(received(manifest, channel), version)
        if self.compares:
            sums_P2 = torch.zeros(len(manifest.tensors), 2, dtype=torch.int64, device=channel.device)
            channel.broadcast(sums_P2)
            self.check(self.target, manifest.tensors, sums_P2, version)

    def check(self, target: WeightLoader, specs: list[TensorSpec], sums_P2: Tensor, version: int) -> None:
        """What the engine computes with against what the actor has."""
        held = target.held_weights()
        faults = [] if held is None else self.comparison.differing(specs, sums_P2, held)
        if faults:
            raise ModelError(
                f"{self.setting}: after the weight sync of step {version} the rollout engine does not have the actor's "
                f"weights: {listed(faults, len(specs))}. Its answers would be those of another policy. This is an "
                "error of rloom or of the engine: continue from the last checkpoint with another "
                "actor_rollout_ref.rollout.name (native, hf or vllm)"
            )


def received(manifest: Manifest, channel: Channel) -> Weights:
    for name, shape, dtype in manifest.tensors:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=channel.device)
        channel.broadcast(tensor)
        yield name, tensor


def send_bucket(bucket: Sequence[tuple[str, Tensor]], channel: Channel) -> None:
    """To a receiver that reads a stream of buckets. An empty bucket ends the stream."""
    tensors = [TensorSpec(name, [*tensor.shape], dtype_name(tensor.dtype)) for name, tensor in bucket]
    Manifest(0, tensors).send(channel)  # a server knows its weights by a label, not by a version
    for _, tensor in bucket:
        channel.broadcast(tensor)


def received_stream(channel: Channel) -> Weights:
    while (manifest := Manifest.receive(channel)).tensors:
        yield from received(manifest, channel)


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
    """`reduced` with the GPU's UUID: the processes may number their GPUs in other ways."""
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
