"""The ranks of a sharded engine: how a process joins them, how they are laid out, what they agree on."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rloom.errors import ConfigError

REPLICAS, SHARDS = "replicas", "shards"


def join(
    rank: int, ranks: int, *, address: str, device: torch.device, shared: bool = False, timeout_s: float = 1800
) -> None:
    """Become one of the ranks that meet at `address` (host:port). Every rank calls it; it returns when all are there.

    On a GPU small agreements go through gloo on the host, so that none makes the host wait for the device. `shared`:
    other ranks are on the same GPU, which NCCL refuses; gloo copies their tensors through the host.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_of(device, shared),
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def backend_of(device: torch.device, shared: bool) -> str:
    if device.type != "cuda":
        return "gloo"
    # both devices by name: where the backend is plain "gloo", device meshes make groups of their own, with NCCL
    return "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def leave() -> None:
    dist.destroy_process_group()


class Broadcast:
    """A channel between processes that are no ranks of one engine: its member 0 sends, the others receive."""

    def __init__(
        self,
        member: int,
        members: int,
        *,
        address: str,
        device: torch.device,
        shared: bool = False,  # members on one GPU, as in join
        timeout_s: float = 1800,
    ) -> None:
        host, port = address.rsplit(":", 1)
        patience = timedelta(seconds=timeout_s)
        store = TCPStore(host, int(port), members, is_master=member == 0, timeout=patience)
        self.device, self.sends = device, member == 0
        self.group: Any = (
            dist.ProcessGroupNCCL(store, member, members, dist.ProcessGroupNCCL.Options())
            if device.type == "cuda" and not shared
            else dist.ProcessGroupGloo(store, member, members, patience)
        )

    def broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()


def rank_mesh(device: torch.device, shards: int = -1) -> DeviceMesh:
    """`shards` neighbouring ranks share one copy of the weights, and each such group has its own; -1: all share one.

    Engines that live in the same processes can share it.
    """
    ranks = dist.get_world_size()
    shards = ranks if shards == -1 else shards
    if shards < 1 or ranks % shards:
        raise ConfigError(
            f"fsdp_config.fsdp_size={shards}: {ranks} ranks do not divide into groups of {shards}; "
            "use a number that divides them, or -1"
        )
    if shards == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=(SHARDS,))
    return init_device_mesh(device.type, (ranks // shards, shards), mesh_dim_names=(REPLICAS, SHARDS))


def all_reduce_max(number: int) -> int:
    """The largest of the numbers that the ranks bring."""
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def all_gather_rows(shard: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """A whole tensor of so many rows, from the shards that ranks hold of it (FSDP2's: equal, the last ones shorter).

    DTensor.full_tensor calls a collective that gloo has for tensors on the host alone.
    """
    ranks = mesh[SHARDS].size()
    if ranks == 1:
        return shard
    most = -(-rows // ranks)
    own = shard.new_zeros(most, *shard.shape[1:])
    own[: len(shard)] = shard
    whole = shard.new_empty(most * ranks, *shard.shape[1:])
    dist.all_gather(list(whole.chunk(ranks)), own, group=mesh.get_group(SHARDS))
    return whole[:rows]


def all_reduce_norm(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The norm of a whole, from that of this rank's shard. Replicas hold the same and are not counted twice."""
    square = part.double() ** 2  # float64, so that the root of one rank's own square is the number itself
    dist.all_reduce(square, group=mesh.get_group(SHARDS))
    return square.sqrt().to(part.dtype)
