"""The policy's weights on their way to rollout engines that hold a copy of the model.

Workers that train and generate load the weights of their own engine. With rollout engines on other workers, rank 0 of
the actor broadcasts a manifest (version, names, shapes, dtypes), then the tensors in that order. Only trainable
parameters are sent: the frozen ones are equal since both sides have read the model.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rloom.engines.base import Engine, TensorSpec, dtype_name

Weights = Iterator[tuple[str, Tensor]]


class WeightLoader(Protocol):
    """A rollout engine, as far as weights are concerned."""

    def load_weights(self, weights: Weights, version: int) -> None: ...


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

    def __init__(self, source: Engine | None, target: WeightLoader | None, channel: Channel | None = None) -> None:
        self.source = source  # trains on this worker; None where `target` reads the source's own parameters
        self.target = target  # generates on this worker
        self.channel = channel  # between workers that train and workers that generate

    @torch.no_grad()
    def sync(self, version: int) -> None:
        if self.channel is not None and not self.channel.sends:
            manifest = Manifest.receive(self.channel)
            assert self.target is not None and manifest.version == version
            self.target.load_weights(received(manifest, self.channel), version)
            return
        weights = self.source.weights() if self.source is not None else iter(())
        if self.channel is not None:
            self.send(weights, version, self.channel)
        elif self.target is not None:
            self.target.load_weights(weights, version)
        else:  # a rank that only takes part in gathering
            for _ in weights:
                pass

    def send(self, weights: Weights, version: int, channel: Channel) -> None:
        assert self.source is not None
        Manifest(version, self.source.manifest()).send(channel)
        for _, tensor in weights:
            channel.broadcast(tensor.contiguous())


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
