"""Log-prob, entropy and KL of tokens, from logits of one chunk at a time. T tokens, H hidden size, V vocabulary."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rloom.algos.kl import full_kl

LOGITS_AT_ONCE = 2**26  # elements: 256 MB of float32


Logits = Callable[[Tensor], Tensor]
Outputs = tuple[Tensor, Tensor, Tensor]  # log-prob, entropy, KL


def token_logprobs(
    logits: Logits,
    hidden_TH: Tensor,
    target_T: Tensor,
    *,
    temperature: float,
    chunked: bool,
    entropy_gradient: bool,
    reference: tuple[Logits, Tensor] | None = None,
) -> Outputs:
    """Log-prob of each target, entropy of its distribution, and KL of that distribution to the reference's, at
    `temperature`, in float32. `reference`: its head and its hidden states; without one the KL is 0."""

    def chunk_outputs(hidden: Tensor, target: Tensor, reference_hidden: Tensor | None) -> Outputs:
        chunk_logits = logits(hidden).float() / temperature
        logprobs, entropy = logprob_and_entropy(chunk_logits, target, entropy_gradient)
        if reference is None or reference_hidden is None:
            return logprobs, entropy, torch.zeros_like(entropy)
        with torch.no_grad():
            reference_logits = reference[0](reference_hidden).float() / temperature
        return logprobs, entropy, full_kl(chunk_logits, reference_logits)

    reference_hidden_TH = None if reference is None else reference[1]
    vocabulary = logits(hidden_TH[:0]).shape[-1]
    chunk = max(1, LOGITS_AT_ONCE // vocabulary) if chunked else max(1, len(hidden_TH))
    if len(hidden_TH) <= chunk:
        return chunk_outputs(hidden_TH, target_T, reference_hidden_TH)
    outputs = []
    for first in range(0, len(hidden_TH), chunk):
        span = slice(first, first + chunk)
        reference_hidden = None if reference_hidden_TH is None else reference_hidden_TH[span]
        # the backward pass recomputes these logits
        outputs.append(
            checkpoint(chunk_outputs, hidden_TH[span], target_T[span], reference_hidden, use_reentrant=False)
        )
    logprobs, entropies, kls = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(kls)


def logprob_and_entropy(logits_TV: Tensor, target_T: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    total_T = torch.logsumexp(logits_TV, -1)
    logprobs_T = logits_TV.gather(-1, target_T[:, None]).squeeze(1) - total_T
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probability_TV = (logits_TV - total_T[:, None]).exp()
        entropy_T = total_T - (probability_TV * logits_TV).sum(-1)
    return logprobs_T, entropy_T
