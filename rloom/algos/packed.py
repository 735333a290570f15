"""Sums and means over packed tokens and groups of samples. T tokens, N samples, G groups, A masked tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.batch import Batch

BLOCK = 32  # columns of a discounted sum that one matrix product covers


def sum_by_sample(value_T: Tensor, sample_T: Tensor, samples: int) -> Tensor:
    return value_T.new_zeros(samples).index_add(0, sample_T, value_T)


def masked_mean(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """Mean over the mask; 0 where the mask is empty."""
    return value_T.where(mask_T, 0).sum() / mask_T.sum().clamp(min=1)


def whiten(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """(x - mean) / std over the mask, 0 outside it; the variance is the unbiased one."""
    count = mask_T.sum().clamp(min=1)
    centred_T = (value_T - masked_mean(value_T, mask_T)).where(mask_T, 0)
    variance = centred_T.square().sum() / (count - 1).clamp(min=1)
    return centred_T * torch.rsqrt(variance + 1e-8)


@dataclass(frozen=True)
class Groups:
    """Statistics over the valid answers to each prompt. All results are per sample."""

    member_N: Tensor  # group number of each sample, from 0
    valid_N: Tensor
    counted_N: Tensor  # valid, and one sample of each episode
    size: int

    @classmethod
    def of(cls, batch: Batch) -> "Groups":
        names, member_N = torch.unique(batch.group_N, return_inverse=True)
        return cls(member_N, batch.valid_N, batch.valid_N & batch.counted_N, len(names))

    def total(self, value_N: Tensor) -> Tensor:
        counted_N = value_N.where(self.counted_N, 0)  # where, not times: the value of a failed sample may not be finite
        return value_N.new_zeros(self.size).index_add(0, self.member_N, counted_N)[self.member_N]

    def largest(self, value_N: Tensor) -> Tensor:
        """-inf if no sample of the group is valid."""
        lowest_G = value_N.new_full((self.size,), -torch.inf)
        valid_N = value_N.where(self.valid_N, -torch.inf)
        return lowest_G.scatter_reduce(0, self.member_N, valid_N, "amax")[self.member_N]

    @property
    def count_N(self) -> Tensor:
        return self.total(torch.ones_like(self.member_N))

    @property
    def comparable_N(self) -> Tensor:
        """Valid samples in a group with at least two valid samples."""
        return self.valid_N & (self.count_N >= 2)

    def mean(self, value_N: Tensor) -> Tensor:
        return self.total(value_N) / self.count_N.clamp(min=1)

    def std(self, value_N: Tensor) -> Tensor:
        """Unbiased (n - 1); 0 for a group of one."""
        variance_N = self.total((value_N - self.mean(value_N)).square()) / (self.count_N - 1).clamp(min=1)
        return variance_N.sqrt()


@dataclass(frozen=True)
class Actions:
    """The tokens in the loss, sample after sample, for recursions over time that run on all samples at once.

    Tokens outside the mask (such as a tool's output) are removed: the actions before and after them are neighbours.
    """

    mask_T: Tensor
    place_A: Tensor  # position of each action among all tokens
    count_N: Tensor  # actions per sample

    @classmethod
    def of(cls, batch: Batch) -> "Actions":
        mask_T = batch.loss_mask_T
        place_A = mask_T.nonzero().squeeze(1)
        until_N = torch.searchsorted(place_A, batch.length_N.cumsum(0))  # actions before the end of each sample
        return cls(mask_T, place_A, until_N.diff(prepend=until_N.new_zeros(1)))

    def pick(self, value_T: Tensor) -> Tensor:
        return value_T.index_select(0, self.place_A)

    def put_back(self, value_A: Tensor) -> Tensor:
        """0 outside the mask."""
        return value_A.new_zeros(len(self.mask_T)).masked_scatter_(self.mask_T, value_A)

    def following(self, value_A: Tensor) -> Tensor:
        """The value at the sample's next action; 0 after its last."""
        next_A = value_A.roll(-1)
        last_N = self.count_N.cumsum(0) - 1
        return next_A.index_fill_(0, last_N[self.count_N > 0], 0)

    def discounted_sum(self, value_A: Tensor, factor: float) -> Tensor:
        """S_t = x_t + factor * S_{t+1} within each sample."""
        longest = int(self.count_N.max()) if len(self.count_N) else 0
        blocks = -(-longest // BLOCK)
        filled = torch.arange(blocks * BLOCK, device=value_A.device) < self.count_N[:, None]
        grid = value_A.new_zeros(filled.shape).masked_scatter_(filled, value_A)
        sums = discounted_sum(grid.view(len(self.count_N), blocks, BLOCK), factor)
        return sums.view(filled.shape).masked_select(filled)


def discounted_sum(value_NBK: Tensor, factor: float) -> Tensor:
    """S_t = x_t + factor * S_{t+1} along each row of B blocks of K columns.

    Within a block, one product with the matrix of powers computes all sums; then, from the last block to the first, the
    first sum of the next block is added. B steps instead of B * K.
    """
    blocks, columns = value_NBK.shape[1:]
    column_K = torch.arange(columns, device=value_NBK.device)
    power_K = factor ** torch.arange(columns + 1, dtype=value_NBK.dtype, device=value_NBK.device)
    distance = column_K[:, None] - column_K  # [j, k]: from S_k to x_j
    sums_NBK = value_NBK @ power_K[distance.clamp(min=0)].tril()
    for block in reversed(range(blocks - 1)):
        sums_NBK[:, block].addcmul_(sums_NBK[:, block + 1, :1], power_K[1:].flip(0))
    return sums_NBK
