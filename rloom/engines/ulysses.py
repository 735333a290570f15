"""Sequence parallelism (Ulysses): each rank holds a slice of the tokens, and attends with some of the heads.

T tokens of a micro-batch, padded to a multiple of the u ranks of a group; S = T / u tokens of a rank's slice, H hidden
size; A tokens in the mask whose output comes from a hidden state of the slice.
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
    """The ranks that share a sequence."""

    group: str  # the name only: a compiled graph can hold it, and torch can destroy the group
    ranks: int
    rank: int  # rank of this process within the group


def check_heads(network: Network, ranks: int, among: int, key: str) -> None:
    """Check that `ranks` of the `among` workers can share a sequence: each gets some of the heads."""
    heads = network.decoder.heads
    if ranks > 1 and network.decoder.routing_shape is not None:
        raise ConfigError(
            f"{key}={ranks}: ranks that split a sequence do not replay the rollout's routing "
            "(actor_rollout_ref.actor.router_replay.mode=R3); use 1, or mode=disabled"
        )
    if ranks > 1 and not network.decoder.packed:
        raise ConfigError(
            f"{key}={ranks}: it splits packed samples, and {type(network.decoder.base).__name__} supports only one "
            "sample per row; use 1"
        )
    if heads % ranks:
        able = [str(size) for size in range(1, among + 1) if among % size == 0 and heads % size == 0]
        raise ConfigError(
            f"{key}={ranks}: the {heads} attention heads of {type(network.decoder.base).__name__} do not divide among "
            f"{ranks} ranks; use {' or '.join(able)}"
        )


def new_sequence_parallel_group(ranks: int) -> SequenceParallelGroup:
    """Collective: each `ranks` consecutive ranks become a group."""
    assert dist.get_world_size() % ranks == 0  # the configuration's checks ensure it
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
    """The outputs for all tokens of a micro-batch, which all ranks of the group get. Each runs its slice.

    Only the outputs are gathered. All ranks compute the same loss; its gradient flows to the rank of each output.
    """
    tokens, shard = len(device_batch.tokens_T), SequenceShard(host_batch, device_batch, group)
    hidden_SH = network.decoder.packed_hidden(shard.tokens_S, shard.attend, shard.position_S)
    found = network.head_outputs(hidden_SH[shard.index_A], shard.target_A, entropy_gradient=entropy_gradient)

    def gather(output_A: Tensor) -> Tensor:
        output_S = output_A.new_zeros(len(shard.tokens_S)).index_put((shard.index_A,), output_A)
        before_T: Tensor = Gather.apply(output_S, group)  # at the index of the hidden state: one before the token
        return pad(before_T, (1, 0))[:tokens]

    return TokenOutputs(gather(found.output_T), None if found.entropy_T is None else gather(found.entropy_T))


class SequenceShard:
    """This rank's slice of a micro-batch."""

    def __init__(self, host_batch: Batch, device_batch: Batch, group: SequenceParallelGroup) -> None:
        padding = -len(device_batch.tokens_T) % group.ranks
        # the padding is a sample of its own, so that no other sample attends to it
        length_N = (
            torch.cat([host_batch.length_N, host_batch.length_N.new_tensor([padding])])
            if padding
            else host_batch.length_N
        )
        packed = PackedAttention(length_N, device_batch.tokens_T.device)
        size = (len(device_batch.tokens_T) + padding) // group.ranks
        first = group.rank * size
        own = slice(first, first + size)
        self.tokens_S = pad(device_batch.tokens_T, (0, padding))[own]
        self.position_S = packed.position_T[own]
        self.attend = UlyssesAttention(packed, group)
        before_A = host_batch.mask_T.nonzero().squeeze(1) - 1  # a log-prob comes from the hidden state before the token
        before_A = before_A[(before_A >= own.start) & (before_A < own.stop)]
        self.index_A = send(before_A - first, device_batch.tokens_T.device)
        self.target_A = device_batch.tokens_T[self.index_A + first + 1]


def process_group(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name)  # type: ignore[arg-type]  # GroupName is a str


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def place_in(group: str) -> tuple[int, int]:
    """(rank, ranks): constants for torch.compile, which treats attributes of an object, and heads divided by one, as
    dynamic."""
    return process_group(group).rank(), process_group(group).size()


class UlyssesAttention:
    """Attention over all tokens: all-to-all turns a slice with all heads into all tokens with some heads, and back."""

    def __init__(self, packed: PackedAttention, group: SequenceParallelGroup) -> None:
        self.packed, self.group = packed, group.group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        rank, ranks = place_in(self.group)
        repeats = ranks // gcd(key.shape[1], ranks)
        if repeats > 1:  # each rank gets the keys of its queries
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        parts = [by_rank(tensor.to(value.dtype), ranks) for tensor in (query, key, value)]
        joined = torch.cat([part.flatten(2) for part in parts], dim=2)  # one all-to-all instead of three
        received_TC = exchange(joined, self.group).flatten(0, 1)
        split = received_TC.split([part.shape[2] * part.shape[3] for part in parts], dim=1)
        # [tokens, heads * size] -> [1, heads, tokens, size]
        some_heads = [
            part_TC.unflatten(1, part.shape[2:]).transpose(0, 1).unsqueeze(0)
            for part_TC, part in zip(split, parts, strict=True)
        ]
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.unflatten(0, (ranks, -1))[rank])
        out = self.packed(some_heads[0], some_heads[1], some_heads[2], options)[0]  # [tokens, heads, size]
        # [rank of the heads, slice, heads, size]
        returned: Tensor = exchange(out.unflatten(0, (ranks, -1)), self.group)
        return returned.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def reset(self) -> None:
        """It keeps no state between layers."""


def by_rank(packed: Tensor, ranks: int) -> Tensor:
    """[1, heads, slice, size] -> [ranks, slice, heads of a rank, size]"""
    parts: Tensor = packed[0].unflatten(0, (ranks, -1))
    return parts.transpose(1, 2)


@torch.library.custom_op("rloom::exchange", mutates_args=())
def exchange(parts: Tensor, group: str) -> Tensor:
    """All-to-all: part i along the first dimension goes to rank i of the group; the result is in rank order."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=process_group(group))
    return received


@exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def save_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def exchange_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange(gradient, ctx.group), None


exchange.register_autograd(exchange_backward, setup_context=save_group)


class Gather(torch.autograd.Function):
    """All-gather of the slices. Every rank has the full gradient, so the backward pass takes its own slice of it."""

    @staticmethod
    def forward(ctx: Any, own_S: Tensor, group: SequenceParallelGroup) -> Tensor:
        ctx.own = slice(group.rank * len(own_S), (group.rank + 1) * len(own_S))
        slices = [torch.empty_like(own_S) for _ in range(group.ranks)]
        dist.all_gather(slices, own_S, group=process_group(group.group))
        return torch.cat(slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None]:
        return gradient_T[ctx.own], None
