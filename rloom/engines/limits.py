"""Limits of the training engines that `rloom plan` counts with. No torch here."""

UNREDUCED_SHARE = 0.25  # of a GPU's memory: the most that gradients not yet summed over ranks may take
