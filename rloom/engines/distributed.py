"""The process group of a sharded engine: initialisation, device mesh and small collectives."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _update_default_pg,
    _world,
)
from torch.distributed.rendezvous import rendezvous

from rloom.errors import ConfigError

T = TypeVar("T")
REPLICAS, SHARDS = "replicas", "shards"
SUBGROUP_NUMBERS = 1_000_000  # torch numbers process groups; those that only some ranks create get numbers from here


def join(
    rank: int, ranks: int, *, address: str, device: torch.device, shared: bool = False, timeout_s: float = 1800
) -> None:
    """Initialise the process group at `address` (host:port). Every rank calls this; it returns when all have joined.

    On a GPU, collectives over CPU tensors use gloo, so that they need no device synchronisation. `shared`: other ranks
    use the same GPU, which NCCL does not support; gloo copies their tensors through the host.
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
    # both devices by name: with plain "gloo", device meshes create their padded groups, with NCCL
    return "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"


def leave() -> None:
    dist.destroy_process_group()


@contextmanager
def as_whole_group(ranks: Sequence[int]) -> Iterator[None]:
    """In it, the default process group has these ranks only, for a library that uses all ranks of that group.

    The ranks enter it together, without the others. Objects created in it keep using these ranks.
    """
    whole, groups = dist.group.WORLD, _world.group_count
    backend, store = _world.pg_map[cast(Any, whole)]
    part, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        [*ranks],
        dist.Backend(backend),
        store,
        # dist.new_group names a group by the number of those that a rank is in, which can differ between ranks
        group_name=cast(Any, f"ranks {[*ranks]}"),
        timeout=timedelta(minutes=30),
    )
    _world.pg_group_ranks[part] = {rank: position for position, rank in enumerate(ranks)}
    _update_default_pg(part)
    _world.group_count += SUBGROUP_NUMBERS  # later groups of all ranks get the same numbers on all of them
    try:
        yield
    finally:
        _update_default_pg(whole)
        _world.group_count = groups


class Broadcast:
    """A channel between processes outside of an engine's process group: member 0 sends, the others receive."""

    def __init__(
        self,
        member: int,
        members: int,
        *,
        address: str,
        device: torch.device,
        shared: bool = False,  # several members on one GPU, as in join
        timeout_s: float = 1800,
    ) -> None:
        host, port = address.rsplit(":", 1)
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, int(port), members, is_master=member == 0, timeout=timeout, multi_tenant=True)
        self.device, self.sends = device, member == 0
        self.group: Any
        if device.type == "cuda" and not shared:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, member, members, options)
        else:
            self.group = dist.ProcessGroupGloo(store, member, members, timeout)

    def broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()


class NamedGroup:
    """A process group with an inference server: rank 0 trains and sends, the ranks of the server receive.

    Built by name beside any other group of the process, in the steps in which SGLang builds its own
    (`init_weights_update_group`): the keys in the store are the same, so that both sides meet.
    """

    def __init__(
        self, name: str, rank: int, ranks: int, *, address: str, backend: str, device: torch.device, timeout_s: float
    ) -> None:
        timeout = timedelta(seconds=timeout_s)
        store, rank, ranks = next(rendezvous(f"tcp://{address}", rank, ranks, timeout=timeout))
        store.set_timeout(timeout)
        self.name, self.rank, self.ranks, self.device = name, rank, ranks, device
        self.group, _ = _new_process_group_helper(
            ranks,
            rank,
            [],
            dist.Backend(backend),
            PrefixStore(name, store),
            group_name=cast(Any, name),  # a NewType of str
            timeout=timeout,
        )
        _world.pg_group_ranks[self.group] = {rank: rank for rank in range(ranks)}  # destroy_process_group reads it

    @property
    def sends(self) -> bool:
        return self.rank == 0

    def broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def barrier(self) -> None:
        self.group.barrier().wait()

    def close(self) -> None:
        """Ends collectives that wait for a server that died, too."""
        with suppress(RuntimeError):
            self.group.abort()
        with suppress(RuntimeError, ValueError, KeyError):
            dist.destroy_process_group(self.group)


def rank_mesh(device: torch.device, shards: int = -1) -> DeviceMesh:
    """Each `shards` consecutive ranks shard one replica of the weights; -1: all ranks shard one replica.

    Engines in the same processes can share the mesh.
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
    """The maximum of `number` over all ranks."""
    result = torch.tensor(number)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return int(result)


def all_gather_objects(own: T) -> list[T]:
    """The objects of all ranks, in the order of the ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def all_gather_rows(shard: Tensor, rows: int, mesh: DeviceMesh) -> Tensor:
    """The full tensor with `rows` rows from the ranks' shards (as FSDP2 makes them: equal, the last ones shorter).

    DTensor.full_tensor uses a collective that gloo supports for CPU tensors only.
    """
    ranks = mesh[SHARDS].size()
    if ranks == 1:
        return shard
    rows_per_rank = -(-rows // ranks)
    padded = shard.new_zeros(rows_per_rank, *shard.shape[1:])
    padded[: len(shard)] = shard
    full = shard.new_empty(rows_per_rank * ranks, *shard.shape[1:])
    dist.all_gather(list(full.chunk(ranks)), padded, group=mesh.get_group(SHARDS))
    return full[:rows]


def all_reduce_norm(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """The norm of the full gradient from that of this rank's shard; replicas hold equal shards and count once."""
    square = part.double() ** 2  # in float64 the root of the square of one rank's norm is that norm
    dist.all_reduce(square, group=mesh.get_group(SHARDS))
    return square.sqrt().to(part.dtype)
