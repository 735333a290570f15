"""How ranks come by their shards when only the first has read the model: it hands out its weights, one at a time.

The other ranks bring a network whose parameters are on the meta device: shapes without numbers. For what learns, a
host then holds a model once, not once for each of its GPUs.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloom.engines.distributed import all_reduce_max
from rloom.engines.storage import fill

Weights = dict[str, Tensor]


def weights_to_broadcast(module: nn.Module) -> Weights | None:
    """Before sharding, on every rank. None: each rank has read the model itself."""
    lacks = any(parameter.is_meta for parameter in module.parameters())
    if not all_reduce_max(int(lacks)):
        return None
    assert lacks == (dist.get_rank() > 0), "the first rank reads the model, and no other"
    return {} if lacks else {name: parameter.detach() for name, parameter in module.named_parameters()}


def allocate_shards(root: nn.Module, device: torch.device) -> None:
    """Memory for shards without numbers. Parameters stay the objects they are; buffers have numbers of their own."""
    buffers = dict(root.named_buffers())
    root.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        setattr(root.get_submodule(owner), last, buffer)


@torch.no_grad()
def broadcast_weights(weights: Weights, module: nn.Module, device: torch.device) -> None:
    """From the first rank's weights, which it lets go, into the shards of all."""
    first = bool(weights)
    for name, own in module.named_parameters():
        whole = torch.empty(own.shape, dtype=own.dtype, device=device)
        if first:
            whole.copy_(weights.pop(name))
        dist.broadcast(whole, src=0)
        fill(own, whole)
    for buffer in module.buffers():  # some families keep numbers there that come with the weights
        dist.broadcast(buffer, src=0)
