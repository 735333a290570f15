"""Sampling of the next token. B sequences, V vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from rloom.rollout.base import Request, Sampling


def uniform_draws(requests: Sequence[Request]) -> Tensor | None:
    """One uniform number for each token of each answer, on the host; None if decoding is greedy."""
    if requests[0].sampling.temperature == 0:
        return None
    draws = [
        torch.rand(request.sampling.max_new_tokens, generator=torch.Generator().manual_seed(request.seed))
        for request in requests
    ]
    longest = max(map(len, draws))
    return torch.stack([pad(draw, (0, longest - len(draw))) for draw in draws])


def sample_tokens(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token, log-prob) of each sequence, from one uniform number each: independent of the rest of the batch."""
    logits_BV = logits_BV.float()
    if sampling.temperature == 0:
        logprobs_BV = logits_BV.log_softmax(-1)
        token_B = logits_BV.argmax(-1)
    else:
        logprobs_BV = (logits_BV / sampling.temperature).log_softmax(-1)
        token_B = inverse_cdf(filter_top_k_top_p(logprobs_BV, sampling).exp(), uniform_B)
    return token_B, logprobs_BV.gather(1, token_B[:, None]).squeeze(1)


def inverse_cdf(probability_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds the uniform number. Weights need not sum to 1."""
    sum_BV = probability_BV.double().cumsum(-1)  # in float32, rare tokens of a large vocabulary would be lost
    threshold_B = uniform_B.double() * sum_BV[:, -1]
    return torch.searchsorted(sum_BV, threshold_B[:, None], right=True).squeeze(1).clamp(max=sum_BV.shape[1] - 1)


def filter_top_k_top_p(logprobs_BV: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p over the remaining tokens, in the order of vLLM and transformers; removed ones get -inf."""
    vocabulary = logprobs_BV.shape[1]
    if 0 < sampling.top_k < vocabulary:
        threshold_B1 = logprobs_BV.topk(sampling.top_k, -1).values[:, -1:]
        logprobs_BV = logprobs_BV.masked_fill(logprobs_BV < threshold_B1, float("-inf"))
    if sampling.top_p < 1:
        sorted_BV, order_BV = logprobs_BV.sort(-1, descending=True)
        before_BV = sorted_BV.softmax(-1).cumsum(-1) - sorted_BV.softmax(-1)
        removed_BV = (before_BV >= sampling.top_p).scatter(1, order_BV, before_BV >= sampling.top_p)
        logprobs_BV = logprobs_BV.masked_fill(removed_BV, float("-inf"))
    return logprobs_BV
