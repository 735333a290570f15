"""Limits of the models' code that `rloom plan` counts with. No torch here."""

LOGITS_AT_ONCE = 2**29  # numbers in the fused head's buffer: 2 GB of float32
