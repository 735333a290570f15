"""DAPO's two ways with rewards (Yu et al. 2025): the over-long penalty and dynamic sampling. N samples, G groups."""

import torch
from torch import Tensor


def overlong_penalty(answer_length_N: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """What is added to the score of a long answer: from 0 down to -factor over the last `buffer` tokens allowed."""
    over_N = (answer_length_N - (max_length - buffer)) / buffer
    return -factor * over_N.clamp(0, 1)


def informative_groups(score_N: Tensor, group_N: Tensor, valid_N: Tensor) -> Tensor:
    """Which groups, in ascending order of `group_N`, have two valid scores that differ: the others teach nothing."""
    names, member_N = torch.unique(group_N, return_inverse=True)
    empty_G = score_N.new_full((len(names),), torch.inf)
    lowest_G = empty_G.scatter_reduce(0, member_N, score_N.where(valid_N, torch.inf), "amin")
    highest_G = (-empty_G).scatter_reduce(0, member_N, score_N.where(valid_N, -torch.inf), "amax")
    return lowest_G < highest_G
