"""The critic's loss."""

import torch
from torch import Tensor

from rloom.algos.policy_losses import TokenLoss


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip_range: float) -> TokenLoss:
    """Half the squared error, or that of the value held within `clip_range` of the old one, whichever is worse."""
    # not old + (new - old): that rounds, and a value that nobody holds would count as held
    held_T = values_T.clamp(old_values_T - clip_range, old_values_T + clip_range)
    plain_T = (values_T - returns_T).square()
    clipped_T = (held_T - returns_T).square()
    return TokenLoss(
        0.5 * torch.maximum(plain_T, clipped_T), {"critic/vf_clipfrac": (clipped_T > plain_T).detach().float()}
    )
