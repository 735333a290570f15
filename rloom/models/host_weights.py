"""Frozen weights that are in host memory while they are not in use."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn


class HostWeights:
    """The host keeps a copy for good, since frozen weights do not change: releasing them copies nothing back."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = list(chain(module.parameters(), module.buffers()))
        # pinned memory: copies to the device run at the full speed of the bus, and do not wait for each other
        self.host = [
            tensor.detach().pin_memory() if device.type == "cuda" else tensor.detach() for tensor in self.tensors
        ]
        self.release()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = copy.to(self.device, non_blocking=True)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = copy
