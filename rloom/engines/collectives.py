"""Every collective that rloom uses, with numbers that are known, on the ranks of `rloom doctor gpus`."""

import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.engines.distributed import Broadcast, all_gather_objects, join
from rloom.engines.ulysses import exchange, new_sequence_parallel_group
from rloom.errors import WorkerError


class Rank:
    """What the process of a rank runs."""

    def __init__(self) -> None:
        self.roles = {"rank": self}

    def join(self, rank: int, ranks: int, address: str, channel: str, on_gpu: bool, timeout_s: float) -> None:
        warnings.simplefilter("ignore", FutureWarning)  # new names of collectives that torch 2.11 does not have
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cuda:0" if on_gpu else "cpu")
        self.channel, self.timeout_s = channel, timeout_s
        join(rank, ranks, address=address, device=self.device, timeout_s=timeout_s)

    def check(self, name: str) -> None:
        found, wanted = COLLECTIVES[name](self)
        if found.flatten().tolist() != wanted:
            raise WorkerError(f"rank {self.rank} has {found.flatten().tolist()} instead of {wanted}")

    def number(self, *shape: int) -> Tensor:
        """A tensor filled with this rank's number, which is rank + 1."""
        return torch.full(shape, self.rank + 1.0, device=self.device)

    @property
    def numbers(self) -> list[float]:
        """The numbers of all ranks, in their order."""
        return [rank + 1.0 for rank in range(self.ranks)]


Found = tuple[Tensor, list[float]]  # what a rank has, and what it should have


def all_reduce(rank: Rank) -> Found:
    summed, largest = rank.number(1), rank.number(1).cpu()
    dist.all_reduce(summed)
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # counts, on the host
    return torch.cat([summed.cpu(), largest]), [sum(rank.numbers), float(rank.ranks)]


def all_gather(rank: Rank) -> Found:
    parts = [rank.number(1) for _ in range(rank.ranks)]
    dist.all_gather(parts, rank.number(1))
    whole = torch.empty(rank.ranks, device=rank.device)
    dist.all_gather_into_tensor(whole, rank.number(1))
    return torch.cat([*parts, whole]), 2 * rank.numbers


def reduce_scatter(rank: Rank) -> Found:
    own = torch.empty(1, device=rank.device)
    dist.reduce_scatter_tensor(own, rank.number(rank.ranks))
    return own, [sum(rank.numbers)]


def broadcast(rank: Rank) -> Found:
    sent, object_of_first = rank.number(1), [rank.rank]
    dist.broadcast(sent, src=0)
    dist.broadcast_object_list(object_of_first, src=0)
    objects = [*object_of_first, *all_gather_objects(rank.rank)]
    return torch.cat([sent.cpu(), torch.tensor(objects, dtype=torch.float32)]), [
        1.0,
        0.0,
        *map(float, range(rank.ranks)),
    ]


def all_to_all(rank: Rank) -> Found:
    """The exchange of Ulysses sequence parallelism."""
    group = new_sequence_parallel_group(rank.ranks)
    return exchange(rank.number(rank.ranks), group.group), rank.numbers


def point_to_point(rank: Rank) -> Found:
    """A tensor sent to the next rank, as between the stages of a pipeline."""
    received = torch.empty(1, device=rank.device)
    operations = [
        dist.P2POp(dist.isend, rank.number(1), (rank.rank + 1) % rank.ranks),
        dist.P2POp(dist.irecv, received, (rank.rank - 1) % rank.ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received, [rank.numbers[rank.rank - 1]]


def weight_channel(rank: Rank) -> Found:
    """The channel to rollout engines on workers of their own."""
    channel = Broadcast(rank.rank, rank.ranks, address=rank.channel, device=rank.device, timeout_s=rank.timeout_s)
    sent = rank.number(3).bfloat16()
    channel.broadcast(sent)
    return sent.float(), [1.0] * 3


COLLECTIVES: Mapping[str, Callable[[Rank], Found]] = {
    "all-reduce": all_reduce,
    "all-gather": all_gather,
    "reduce-scatter": reduce_scatter,
    "broadcast, objects": broadcast,
    "all-to-all": all_to_all,
    "point to point": point_to_point,
    "channel for weights": weight_channel,
}
