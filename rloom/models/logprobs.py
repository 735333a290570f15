"""Log-prob and entropy of tokens without ever holding the logits of all of them. T tokens, H hidden, V vocabulary."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**26  # numbers: 256 MB of float32


def token_logprobs(
    logits: Callable[[Tensor], Tensor],
    hidden_TH: Tensor,
    target_T: Tensor,
    temperature: float,
    chunked: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of each distribution), both at `temperature`, in float32."""

    def chunk_outputs(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return logprob_and_entropy(logits(hidden).float() / temperature, target, entropy_gradient)

    vocabulary = logits(hidden_TH[:0]).shape[-1]
    chunk = max(1, LOGITS_AT_ONCE // vocabulary) if chunked else max(1, len(hidden_TH))
    if len(hidden_TH) <= chunk:
        return chunk_outputs(hidden_TH, target_T)
    parts = [
        checkpoint(chunk_outputs, hidden, target, use_reentrant=False)  # the backward pass recomputes these logits
        for hidden, target in zip(hidden_TH.split(chunk), target_T.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def logprob_and_entropy(logits_TV: Tensor, target_T: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    total_T = torch.logsumexp(logits_TV, -1)
    logprobs_T = logits_TV.gather(-1, target_T[:, None]).squeeze(1) - total_T
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probability_TV = (logits_TV - total_T[:, None]).exp()
        entropy_T = total_T - (probability_TV * logits_TV).sum(-1)
    return logprobs_T, entropy_T
