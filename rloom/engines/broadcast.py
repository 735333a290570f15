"""Broadcast the weights from rank 0, which alone has read the model, into the shards of all ranks, one at a time.

The other ranks create the network on the meta device, so a host holds one copy of a trained model in memory, not one
for each of its GPUs.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloom.engines.distributed import all_reduce_max
from rloom.engines.storage import copy_full

Weights = dict[str, Tensor]


def weights_to_broadcast(module: nn.Module) -> Weights | None:
    """Called on every rank before sharding. None: each rank has read the model itself."""
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if not all_reduce_max(int(is_meta)):
        return None
    assert is_meta == (dist.get_rank() > 0), "only rank 0 reads the model"
    return {} if is_meta else {name: parameter.detach() for name, parameter in module.named_parameters()}


def allocate_shards(root: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised shards. Parameters stay the same objects; buffers keep their values."""
    buffers = dict(root.named_buffers())
    root.to_empty(device=device)
    for name, buffer in buffers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(root.get_submodule(parent), attribute, buffer)


@torch.no_grad()
def broadcast_weights(weights: Weights, module: nn.Module, device: torch.device) -> None:
    """From the weights of rank 0, which frees each after sending it, into the shards of all ranks."""
    is_source = bool(weights)
    for name, own in module.named_parameters():
        full = torch.empty(own.shape, dtype=own.dtype, device=device)
        if is_source:
            full.copy_(weights.pop(name))
        dist.broadcast(full, src=0)
        copy_full(own, full)
    for buffer in module.buffers():  # in some families buffers are saved with the weights
        dist.broadcast(buffer, src=0)
