"""How ranks come by their shards when only the first has read the model: it hands out its weights, one at a time.

The other ranks bring a network whose parameters are on the meta device: shapes without numbers. A host then holds a
model once, not once for each of its GPUs.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rloom.engines.mesh import highest
from rloom.engines.storage import fill

Weights = dict[str, Tensor]


def weights_to_hand_out(module: nn.Module) -> Weights | None:
    """Before sharding, on every rank. None: each rank has read the model itself."""
    lacks = any(parameter.is_meta for parameter in module.parameters())
    if not highest(int(lacks)):
        return None
    assert lacks == (dist.get_rank() > 0), "the first rank reads the model, and no other"
    return {} if lacks else {name: parameter.detach() for name, parameter in module.named_parameters()}


def make_room(root: nn.Module, device: torch.device) -> None:
    """Memory for shards without numbers. Buffers have theirs, and parameters that are one stay one."""
    buffers = dict(root.named_buffers())
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
    root.to_empty(device=device)
    for (first, own), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, own))
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, buffer)


@torch.no_grad()
def hand_out(weights: Weights, parameters: Mapping[str, DTensor], device: torch.device) -> None:
    """From the first rank's weights, which it lets go, into the shards of all."""
    first = bool(weights)
    for name, own in parameters.items():
        whole = torch.empty(own.shape, dtype=own.dtype, device=device)
        if first:
            whole.copy_(weights.pop(name))
        dist.broadcast(whole, src=0)
        fill(own, whole)
