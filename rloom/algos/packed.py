"""Sums and means over packed tokens and groups of samples. T tokens, N samples, G groups, A actions of a sample."""

from dataclasses import dataclass

import torch
from torch import Tensor


def sum_by_sample(value_T: Tensor, sample_T: Tensor, samples: int) -> Tensor:
    return value_T.new_zeros(samples).index_add(0, sample_T, value_T)


def masked_mean(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """Mean over the mask; 0 where the mask is empty."""
    return (value_T * mask_T).sum() / mask_T.sum().clamp(min=1)


def whiten(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """(x - mean) / std over the mask, 0 outside it; the variance is the unbiased one."""
    count = mask_T.sum().clamp(min=1)
    centred_T = (value_T - masked_mean(value_T, mask_T)) * mask_T
    variance = centred_T.square().sum() / (count - 1).clamp(min=1)
    return centred_T * torch.rsqrt(variance + 1e-8)


@dataclass(frozen=True)
class GroupStats:
    """Per sample: statistics of its group, over the samples whose score did not fail."""

    count_N: Tensor
    mean_N: Tensor
    std_N: Tensor  # with n - 1
    comparable_N: Tensor  # bool: a valid sample with at least one valid sibling


def group_stats(value_N: Tensor, group_N: Tensor, valid_N: Tensor) -> GroupStats:
    groups, member_N = torch.unique(group_N, return_inverse=True)
    weight_N = valid_N.to(value_N.dtype)

    def total(x_N: Tensor) -> Tensor:
        return value_N.new_zeros(len(groups)).index_add(0, member_N, x_N * weight_N)

    count_G = total(torch.ones_like(value_N))
    mean_G = total(value_N) / count_G.clamp(min=1)
    variance_G = total((value_N - mean_G[member_N]).square()) / (count_G - 1).clamp(min=1)
    count_N = count_G[member_N]
    return GroupStats(count_N, mean_G[member_N], variance_G.sqrt()[member_N], valid_N & (count_N >= 2))


@dataclass(frozen=True)
class ActionGrid:
    """The tokens of a mask laid out one sample a row, so that a recursion over time runs over all samples at once.

    Tokens outside the mask (a tool's output, say) leave no gap: the action before them is followed by the one after.
    """

    mask_T: Tensor
    row_A: Tensor  # sample of each masked token
    column_A: Tensor  # how many masked tokens of its sample come before it
    samples: int

    @classmethod
    def of(cls, mask_T: Tensor, sample_T: Tensor, samples: int) -> "ActionGrid":
        row_A = sample_T[mask_T]
        count_N = torch.bincount(row_A, minlength=samples)
        first_N = torch.cumsum(count_N, 0) - count_N
        column_A = torch.arange(len(row_A), device=mask_T.device) - first_N[row_A]
        return cls(mask_T, row_A, column_A, samples)

    @property
    def width(self) -> int:
        return int(self.column_A.max()) + 1 if len(self.column_A) else 0

    def spread(self, value_T: Tensor) -> Tensor:
        """Packed tokens -> [samples, width], 0 where a sample is shorter."""
        grid = value_T.new_zeros(self.samples, self.width)
        grid[self.row_A, self.column_A] = value_T[self.mask_T]
        return grid

    def gather(self, grid: Tensor) -> Tensor:
        """[samples, width] -> packed tokens, 0 outside the mask."""
        value_T = grid.new_zeros(len(self.mask_T))
        value_T[self.mask_T] = grid[self.row_A, self.column_A]
        return value_T
