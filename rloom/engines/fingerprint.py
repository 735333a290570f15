"""Fingerprints of weights: exact sums over the bits of a tensor, by which a rollout engine's weights are compared with
the actor's.

The bits of a row are read as 64-bit integers, R rows of W words. A fingerprint is two sums modulo 2^64: over the rows
and over the columns of words, each with a factor of its own, so that another value, a swap, a transposition or a part
that is missing changes it. Integer sums do not depend on their order: the shards of a tensor give the sum of theirs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rloom.engines.base import TensorSpec, dtype_name

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
WORD = 8
ROWS, COLUMNS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # any two large odd numbers below 2^62
NAMES_SHOWN = 5


def fingerprint(tensor: Tensor, first_row: int = 0) -> Tensor:
    """int64, 2 sums, on the tensor's device. `first_row`: of this shard, in the whole tensor."""
    if not tensor.numel():  # a rank may have no row
        return torch.zeros(2, dtype=torch.int64, device=tensor.device)
    words_RW = words(tensor.detach())
    rows, columns = words_RW.shape
    row_sum = (factors(ROWS, first_row, rows, tensor.device) * words_RW.sum(1)).sum()
    column_sum = (factors(COLUMNS, 0, columns, tensor.device) * words_RW.sum(0)).sum()
    return torch.stack([row_sum, column_sum])


def words(tensor: Tensor) -> Tensor:
    """The tensor's bits as a matrix of integers. Rows that are no multiple of 8 bytes get a word for each number."""
    rows = tensor.shape[0] if tensor.dim() else 1
    bits_RC = tensor.contiguous().reshape(rows, -1).view(INTEGERS[tensor.element_size()])
    if bits_RC.shape[1] * tensor.element_size() % WORD:
        return bits_RC.long()
    if bits_RC.storage_offset() * tensor.element_size() % WORD:
        bits_RC = bits_RC.clone()  # torch reads words at addresses that are multiples of 8 only
    return bits_RC.view(torch.int64)


def factors(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """An odd number for each place: multiplication by it is invertible modulo 2^64."""
    mixed = torch.arange(first + 1, first + count + 1, device=device) * seed
    return (mixed ^ (mixed >> 29)) * seed | 1


class SyncComparison:
    """Of what an engine holds with the fingerprints of what the actor has, sync after sync."""

    def __init__(self) -> None:
        self.before: dict[str, tuple[int, int]] = {}  # what the engine held after the last sync

    def differing(self, specs: Sequence[TensorSpec], wanted_P2: Tensor, held: Mapping[str, Tensor]) -> list[str]:
        """A text for each parameter that differs. One that the engine holds in another dtype is not compared.

        P: parameters. The sums are read together, with one wait for the device.
        """
        compared = [
            (spec, wanted_2)
            for spec, wanted_2 in zip(specs, wanted_P2, strict=True)
            if spec.name not in held or dtype_name(held[spec.name].dtype) == spec.dtype
        ]
        present = [spec.name for spec, _ in compared if spec.name in held]
        own = pairs([fingerprint(held[name]) for name in present])
        found = dict(zip(present, own, strict=True))
        wanted = dict(zip([spec.name for spec, _ in compared], pairs([one for _, one in compared]), strict=True))
        names = {sums: name for name, sums in wanted.items()}
        before, self.before = self.before, found
        return [
            f"{name} ({self.reason(found.get(name), before.get(name), names)})"
            for name, sums in wanted.items()
            if found.get(name) != sums
        ]

    def reason(
        self, found: tuple[int, int] | None, before: tuple[int, int] | None, names: Mapping[tuple[int, int], str]
    ) -> str:
        if found is None:
            return "the engine has no such parameter"
        if found == before:
            return "as before this update"
        return f"the values of {names[found]}" if found in names else "other values"


def stacked(sums: Sequence[Tensor]) -> Tensor:
    """P by 2."""
    return torch.stack([*sums]) if sums else torch.zeros(0, 2, dtype=torch.int64)


def pairs(sums: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(row, column) for row, column in stacked(sums).tolist()]


def listed(faults: Sequence[str], of: int) -> str:
    """The first of them, and how many there are."""
    more = f", and {len(faults) - NAMES_SHOWN} more" if len(faults) > NAMES_SHOWN else ""
    return f"{', '.join(faults[:NAMES_SHOWN])}{more} ({len(faults)} of {of} parameters)"
