"""One sequence on several ranks (Ulysses): each holds a stretch of the tokens, and attends with some of the heads.

T tokens of a pass, padded so that u neighbouring ranks divide them; S = T / u tokens of a rank's stretch, H hidden
size; A answers' tokens (those in the mask) whose number comes from a hidden state of the stretch.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rloom.batch import Batch, TokenOutputs
from rloom.errors import ConfigError
from rloom.models.attention import AttentionOptions, PackedAttention
from rloom.models.network import Network
from rloom.transfer import send


@dataclass(frozen=True)
class SequenceParallelGroup:
    """The ranks that hold one sequence together, as one of them sees them."""

    group: str  # its name, which a compiler can carry through a graph; the group itself is torch's to end
    ranks: int
    rank: int  # of this process among them


def check_heads(network: Network, ranks: int, among: int, key: str) -> None:
    """Of `among` workers `ranks` share a sequence: each gets some of the heads."""
    heads = network.decoder.heads
    if ranks > 1 and not network.decoder.packed:
        raise ConfigError(
            f"{key}={ranks}: it cuts packed samples, and {type(network.decoder.base).__name__} is right with a row for "
            "each sample only; use 1"
        )
    if heads % ranks:
        able = [str(size) for size in range(1, among + 1) if among % size == 0 and heads % size == 0]
        raise ConfigError(
            f"{key}={ranks}: the {heads} attention heads of {type(network.decoder.base).__name__} do not divide among "
            f"{ranks} ranks; use {' or '.join(able)}"
        )


def new_sequence_parallel_group(network: Network, ranks: int) -> SequenceParallelGroup:
    """Collective: each `ranks` ranks in a row become neighbours."""
    # the configuration's checks ask for it
    assert dist.get_world_size() % ranks == 0 and network.decoder.heads % ranks == 0 and network.decoder.packed
    group, _ = dist.new_subgroups(ranks)
    assert isinstance(group, dist.ProcessGroup)
    return SequenceParallelGroup(group.group_name, ranks, group.rank())


def sequence_parallel_outputs(
    network: Network,
    host_batch: Batch,
    device_batch: Batch,
    group: SequenceParallelGroup,
    *,
    entropy_gradient: bool = False,
) -> TokenOutputs:
    """What `network` says of all tokens of a pass that all neighbours bring. Each runs body and head on its stretch.

    Only the numbers are gathered. Their gradient reaches the rank that computed them: the same loss is on all of them.
    """
    tokens, shard = len(device_batch.tokens_T), SequenceShard(host_batch, device_batch, group)
    hidden_SH = network.decoder.packed_hidden(shard.tokens_S, shard.attend, shard.position_S)
    found = network.head_outputs(hidden_SH[shard.place_A], shard.target_A, entropy_gradient=entropy_gradient)

    def of_all(number_A: Tensor) -> Tensor:
        number_S = number_A.new_zeros(len(shard.tokens_S)).index_put((shard.place_A,), number_A)
        before_T: Tensor = Gather.apply(number_S, group)  # where the hidden state is: one before the token
        return pad(before_T, (1, 0))[:tokens]

    return TokenOutputs(of_all(found.output_T), None if found.entropy_T is None else of_all(found.entropy_T))


class SequenceShard:
    """This rank's part of a pass."""

    def __init__(self, host_batch: Batch, device_batch: Batch, group: SequenceParallelGroup) -> None:
        padding = -len(device_batch.tokens_T) % group.ranks
        # a sample of its own: the others do not see it
        length_N = (
            torch.cat([host_batch.length_N, host_batch.length_N.new_tensor([padding])])
            if padding
            else host_batch.length_N
        )
        whole = PackedAttention(length_N, device_batch.tokens_T.device)
        size = (len(device_batch.tokens_T) + padding) // group.ranks
        first = group.rank * size
        own = slice(first, first + size)
        self.tokens_S = pad(device_batch.tokens_T, (0, padding))[own]
        self.position_S = whole.position_T[own]
        self.attend = UlyssesAttention(whole, group)
        before_A = (
            host_batch.mask_T.nonzero().squeeze(1) - 1
        )  # a token's log-prob comes from the hidden state before it
        before_A = before_A[(before_A >= own.start) & (before_A < own.stop)]
        self.place_A = send(before_A - first, device_batch.tokens_T.device)
        self.target_A = device_batch.tokens_T[self.place_A + first + 1]


def process_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # a string by another name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def ranks_of(group: str) -> int:
    """A compiler takes the number an object holds for one that varies, and heads divided by it, too. Not this one."""
    return process_group(group).size()


class UlyssesAttention:
    """Attention of a whole pass: all-to-all turns a stretch with all heads into all tokens with some, and back."""

    def __init__(self, whole: PackedAttention, group: SequenceParallelGroup) -> None:
        self.whole, self.group = whole, group.group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        ranks = ranks_of(self.group)
        repeats = ranks // gcd(key.shape[1], ranks)
        if repeats > 1:  # so that each rank gets the keys of its queries
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        parts = [by_rank(tensor.to(value.dtype), ranks) for tensor in (query, key, value)]
        joined = torch.cat([part.flatten(2) for part in parts], dim=2)  # one exchange, not three
        received_TC = exchange(joined, self.group).flatten(0, 1)
        split = received_TC.split([part.shape[2] * part.shape[3] for part in parts], dim=1)
        # [tokens, heads * size] -> [1, heads, tokens, size]
        some_heads = [
            one.unflatten(1, part.shape[2:]).transpose(0, 1).unsqueeze(0)
            for one, part in zip(split, parts, strict=True)
        ]
        out = self.whole(some_heads[0], some_heads[1], some_heads[2], options)[0]  # [tokens, heads, size]
        # [rank of the heads, stretch, heads, size]
        returned: Tensor = exchange(out.unflatten(0, (ranks, -1)), self.group)
        return returned.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def reset(self) -> None:
        """All layers are the same to it."""


def by_rank(packed: Tensor, ranks: int) -> Tensor:
    """[1, heads, stretch, size] -> [ranks, stretch, heads of a rank, size]"""
    parts: Tensor = packed[0].unflatten(0, (ranks, -1))
    return parts.transpose(1, 2)


@torch.library.custom_op("rloom::exchange", mutates_args=())
def exchange(parts: Tensor, group: str) -> Tensor:
    """Of the parts along the first dimension the i-th goes to neighbour i; theirs come back in the same order."""
    found = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, parts.contiguous(), group=process_group(group))
    return found


@exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def remember_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange(gradient, ctx.group), None


exchange.register_autograd(exchange_back, setup_context=remember_group)


class Gather(torch.autograd.Function):
    """The stretches of all neighbours in a row. Every neighbour has the whole gradient: its own part is enough."""

    @staticmethod
    def forward(ctx: Any, own_S: Tensor, group: SequenceParallelGroup) -> Tensor:
        ctx.own = slice(group.rank * len(own_S), (group.rank + 1) * len(own_S))
        found = [torch.empty_like(own_S) for _ in range(group.ranks)]
        dist.all_gather(found, own_S, group=process_group(group.group))
        return torch.cat(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None]:
        return gradient_T[ctx.own], None
