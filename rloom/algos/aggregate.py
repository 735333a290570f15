"""Aggregation of token losses to one number, divided by counts over the whole mini-batch.

The counts are computed before the mini-batch is split, so the parts of any split sum to the same loss and gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.algos.packed import sum_by_sample
from rloom.batch import Batch, sum_by_episode

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Counts:
    tokens: int  # in the loss
    samples: int  # samples with at least one of them; branches of one episode are one
    horizon: int  # maximum answer length, the constant of seq-mean-token-sum-norm
    # iff samples without a gradient are left out of the update: of the others, over which metrics are means
    measured: "Counts | None" = None

    @classmethod
    def of(cls, batch: Batch, horizon: int, rows: Tensor | None = None) -> "Counts":
        """Of these samples; of all. Their mask is read in place: a mini-batch may have gigabytes."""
        rows_N = torch.arange(len(batch)) if rows is None else rows
        tokens_N = batch.loss_tokens(rows_N)
        with_loss = rows_N[tokens_N > 0]
        samples = with_loss if batch.episode_N is None else batch.episode_N[with_loss].unique()
        return cls(int(tokens_N.sum()), len(samples), horizon)


def episode_tokens(batch: Batch) -> Tensor | None:
    """Tokens in the loss of each sample's episode. None: every sample is an episode."""
    if batch.episode_N is None:
        return None
    return sum_by_episode(batch.loss_tokens(torch.arange(len(batch))), batch)


def aggregate(value_T: Tensor, batch: Batch, mode: str, counts: Counts) -> Tensor:
    mask_T = batch.loss_mask_T
    samples, tokens = max(counts.samples, 1), max(counts.tokens, 1)
    kept_T = value_T.where(mask_T, value_T.new_zeros(()))  # where, not times: a masked value may be infinite
    if mode == "token-mean":
        return kept_T.sum() / tokens
    if mode == "seq-mean-token-sum":
        return kept_T.sum() / samples
    if mode == "seq-mean-token-sum-norm":
        return kept_T.sum() / (samples * counts.horizon)
    assert mode == "seq-mean-token-mean", mode
    if batch.episode_tokens_N is None:
        length_N = sum_by_sample(mask_T.to(value_T.dtype), batch.sample_T, len(batch)).clamp(min=1)
    else:
        length_N = batch.episode_tokens_N.to(value_T.dtype).clamp(min=1)
    return (kept_T / length_N[batch.sample_T]).sum() / samples
