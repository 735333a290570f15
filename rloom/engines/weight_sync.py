"""How a policy's newest weights reach the model that generates, when that is another one than the one that learns."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from rloom.engines.base import Engine


class Channel(Protocol):
    """Tensors from its first member to all others."""

    @property
    def sends(self) -> bool: ...

    def broadcast(self, tensor: Tensor) -> None:
        """Filled in place on those that receive."""


class WeightSync:
    """One worker's part in it. All workers that have one call `load_weights` together."""

    def __init__(self, source: Engine | None, copy: nn.Module | None, channel: Channel | None = None) -> None:
        self.source = source  # learns here
        self.copy = copy  # generates here
        self.channel = channel  # between workers that do only the one or the other

    @torch.no_grad()
    def load_weights(self) -> None:
        own = dict(self.copy.named_parameters()) if self.copy is not None else {}
        for name, tensor in self.arriving():
            if self.copy is not None:
                own[name].copy_(tensor)  # in place: captured graphs know these addresses

    def arriving(self) -> Iterator[tuple[str, Tensor]]:
        if self.source is None:
            assert self.copy is not None and self.channel is not None
            for name, parameter in self.copy.named_parameters():
                room = torch.empty_like(parameter)
                self.channel.broadcast(room)
                yield name, room
            return
        for name, tensor in self.source.weights():
            if self.channel is not None and self.channel.sends:
                self.channel.broadcast(tensor.contiguous())
            yield name, tensor
