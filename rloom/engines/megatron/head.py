"""Log-probs and entropies from logits whose vocabulary the tensor-parallel ranks divide.

A tokens in the mask, H hidden size, V rows of the vocabulary on this rank.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rloom.batch import TokenOutputs
from rloom.engines.megatron.core import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from rloom.engines.megatron.groups import MegatronGroups
from rloom.models.head import CHUNK_LOGITS, linear_float32


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
