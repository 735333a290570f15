"""A micro-batch through this rank's stage: hidden states, and on the last stage the outputs of the role's head.

T tokens of a micro-batch, A of them in the mask, H hidden size, V rows of the vocabulary on this rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rloom.batch import Batch, TokenOutputs
from rloom.engines.megatron.core import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from rloom.engines.megatron.groups import MegatronGroups
from rloom.engines.megatron.layout import ParameterLayout, share
from rloom.engines.megatron.model import Packer, build_stage
from rloom.models.head import CHUNK_LOGITS, fused_logprobs, linear_float32, sample_ranges
from rloom.models.network import (
    ALL,
    LossFn,
    Network,
    PolicyNetwork,
    fused_token_loss,
    kernels_run_on,
    scatter_outputs,
)
from rloom.models.routing import NO_CHOICE
from rloom.transfer import send


class StageOutput(NamedTuple):
    """S tokens of this rank."""

    hidden_S1H: Tensor
    mismatch_S: Tensor | None  # share of replayed experts that the stage's routers would not have chosen


class Answered(NamedTuple):
    """The tokens in the mask."""

    index_A: Tensor
    hidden_AH: Tensor  # before each
    mismatch_A: Tensor | None


class StageNetwork:
    """`described`: the role's network without weights, for its configuration, temperature and rotary embedding."""

    def __init__(
        self,
        described: Network,
        layout: ParameterLayout,
        groups: MegatronGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
        recompute: bool,
        compiles: bool,
        overrides: Mapping[str, Any],
    ) -> None:
        self.layout, self.groups = layout, groups
        self.policy = described if isinstance(described, PolicyNetwork) else None
        self.packer = Packer(described.decoder.body.rotary_emb, device, dtype)
        self.stage = build_stage(
            layout.shape,
            groups,
            device=device,
            dtype=dtype,
            vocabulary=layout.vocabulary,
            recompute=recompute,
            compiles=compiles,
            overrides=overrides,
        )
        if self.policy is None and groups.is_last:
            self.stage.output_layer = None
            with torch.device("meta"):
                self.stage.value_head = nn.Linear(layout.shape.hidden, 1, bias=False)

    def passed_shape(self, size: int) -> tuple[int, int, int]:
        """Shape of the hidden states that a stage passes to the next one, for a micro-batch of `size` tokens."""
        return size // self.slicing_ranks, 1, self.layout.shape.hidden

    @property
    def slicing_ranks(self) -> int:
        return self.groups.sizes.tensor if self.groups.sizes.slices_tokens else 1

    def hidden(self, host_batch: Batch, device_batch: Batch, size: int, received: Tensor | None) -> StageOutput:
        """`size`: tokens with padding."""
        tokens_T, packed = self.packer.pack(host_batch, device_batch, size)
        if device_batch.experts_TMK is not None:
            experts_TMK = device_batch.experts_TMK
            padding = experts_TMK.new_full((size - len(experts_TMK), *experts_TMK.shape[1:]), NO_CHOICE)
            own = share(self.groups.tensor.rank() % self.slicing_ranks, size // self.slicing_ranks)
            packed.experts_SMK = torch.cat([experts_TMK, padding])[own]
            packed.mismatch_S = torch.zeros(len(packed.experts_SMK), device=tokens_T.device)
        hidden: Tensor = self.stage(tokens_T, packed, received)
        return StageOutput(hidden, packed.mismatch_S)

    def answered(self, stage: StageOutput, host_batch: Batch) -> Answered:
        before_A = host_batch.mask_T.nonzero().squeeze(1) - 1
        before_A = send(before_A, stage.hidden_S1H.device)
        hidden_TH = gather_tokens(stage.hidden_S1H, self.groups, partial_gradients=self.policy is not None)
        mismatch_A = None
        if stage.mismatch_S is not None:
            mismatch_A = gather_tokens(stage.mismatch_S[:, None, None], self.groups, partial_gradients=False)[:, 0]
            mismatch_A = mismatch_A[before_A]
        return Answered(before_A + 1, hidden_TH[before_A], mismatch_A)

    def outputs(
        self, stage: StageOutput, host_batch: Batch, device_batch: Batch, *, entropy_gradient: bool = False
    ) -> TokenOutputs:
        """On the last stage."""
        index_A, hidden_AH, mismatch_A = self.answered(stage, host_batch)
        target_A = device_batch.tokens_T[index_A]
        found = self.head(hidden_AH, target_A, entropy_gradient=entropy_gradient)
        found = replace(found, routing_mismatch_T=mismatch_A)
        return scatter_outputs(index_A, len(device_batch.tokens_T), found)

    def head(self, hidden_AH: Tensor, target_A: Tensor, *, entropy_gradient: bool) -> TokenOutputs:
        if self.policy is None:
            return TokenOutputs(self.stage.value_head(hidden_AH.float()).squeeze(1))
        if self.can_fuse(hidden_AH.device):
            options = self.policy.logit_options
            return TokenOutputs(
                *fused_logprobs(hidden_AH, self.head_weight, target_A, options, entropy_gradient=entropy_gradient)
            )
        first = self.groups.tensor.rank() * (self.layout.vocabulary // self.groups.sizes.tensor)
        return vocabulary_parallel_outputs(
            hidden_AH,
            self.head_weight,
            target_A,
            self.groups.tensor,
            first=first,
            temperature=self.policy.temperature,
            entropy_gradient=entropy_gradient,
            chunked=self.policy.chunked,
        )

    @property
    def head_weight(self) -> Tensor:
        """The rows of this rank, without those that pad the vocabulary."""
        tied = self.layout.shape.tied
        weight: Tensor = self.stage.shared_embedding_or_output_weight() if tied else self.stage.output_layer.weight
        rows = len(weight)
        return weight[: min(rows, self.layout.shape.vocabulary - self.groups.tensor.rank() * rows)]

    def loss(
        self,
        stage: StageOutput,
        host_batch: Batch,
        device_batch: Batch,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool,
    ) -> Tensor:
        """On the last stage. Where this rank has the whole vocabulary, fused kernels compute the logits once."""
        if self.policy is not None and self.can_fuse(stage.hidden_S1H.device):
            weight_VH, index_A = self.head_weight, host_batch.mask_T.nonzero().squeeze(1)
            ranges = sample_ranges(index_A, host_batch.length_N, len(weight_VH))
            if ranges:
                index_A, hidden_AH, mismatch_A = self.answered(stage, host_batch)
                options, tokens_T = self.policy.logit_options, device_batch.tokens_T
                return fused_token_loss(
                    hidden_AH, weight_VH, tokens_T, index_A, ranges, loss_fn, options, entropy_gradient, mismatch_A
                )
        return loss_fn(self.outputs(stage, host_batch, device_batch, entropy_gradient=entropy_gradient), ALL, ALL)

    def can_fuse(self, device: torch.device) -> bool:
        return (
            self.policy is not None and self.policy.chunked and self.groups.sizes.tensor == 1 and kernels_run_on(device)
        )


# Log-probs and entropies from logits whose vocabulary the tensor-parallel ranks divide


def gather_tokens(hidden_S1H: Tensor, groups: MegatronGroups, *, partial_gradients: bool) -> Tensor:
    """The hidden states of all tokens. `partial_gradients`: each rank's gradient of them is a summand."""
    if not groups.sizes.slices_tokens:
        hidden = hidden_S1H[:, 0]
        divided = partial_gradients and groups.sizes.tensor > 1
        return copy_to_tensor_model_parallel_region(hidden) if divided else hidden
    gathered: Tensor = gather_from_sequence_parallel_region(hidden_S1H, tensor_parallel_output_grad=partial_gradients)
    return gathered[:, 0]


def vocabulary_parallel_outputs(
    hidden_AH: Tensor,
    weight_VH: Tensor,  # this rank's rows, without padding
    target_A: Tensor,
    group: dist.ProcessGroup,
    *,
    first: int,  # this rank's first row of the whole vocabulary
    temperature: float,
    entropy_gradient: bool,
    chunked: bool,
) -> TokenOutputs:
    def outputs(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = project(hidden, weight_VH).float() / temperature
        return logprob_and_entropy(logits, target - first, group, entropy_gradient)

    rows = max(1, CHUNK_LOGITS // len(weight_VH)) if chunked else max(1, len(hidden_AH))
    if len(hidden_AH) <= rows:
        return TokenOutputs(*outputs(hidden_AH, target_A))
    found = [  # the backward pass recomputes the logits of a chunk
        checkpoint(outputs, hidden_AH[span], target_A[span], use_reentrant=False)
        for span in (slice(start, start + rows) for start in range(0, len(hidden_AH), rows))
    ]
    logprobs, entropies = zip(*found, strict=True)
    return TokenOutputs(torch.cat(logprobs), torch.cat(entropies))


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """In float32 where a kernel supports it, as in PolicyNetwork.logits."""
    return linear_float32(hidden, weight) if hidden.is_cuda else linear(hidden, weight)


def logprob_and_entropy(
    logits_AV: Tensor, target_A: Tensor, group: dist.ProcessGroup, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """`target_A` counts from this rank's first row, and is out of its range on the other ranks."""
    largest_A = logits_AV.detach().amax(-1)
    dist.all_reduce(largest_A, dist.ReduceOp.MAX, group=group)
    shifted_AV = logits_AV - largest_A[:, None]
    exp_AV = shifted_AV.exp()
    total_A = all_sum(exp_AV.sum(-1))
    here_A = (target_A >= 0) & (target_A < logits_AV.shape[1])
    picked_A = shifted_AV.gather(1, torch.where(here_A, target_A, 0)[:, None]).squeeze(1)
    log_total_A = total_A.log()
    logprobs_A = all_sum(torch.where(here_A, picked_A, 0.0)) - log_total_A
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_A = log_total_A - all_sum((exp_AV * shifted_AV).sum(-1)) / total_A
    return logprobs_A, entropy_A


all_sum: Callable[[Tensor], Tensor] = reduce_from_tensor_model_parallel_region
