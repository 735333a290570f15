"""Fingerprints of tensors: what changes them, and that shards have the sums of the whole."""

import pytest
import torch
from torch import Tensor

from rloom.engines.fingerprint import COLUMNS, ROWS, factors, fingerprint


def sums(tensor: Tensor, first_row: int = 0) -> list[int]:
    found: list[int] = fingerprint(tensor, first_row).tolist()
    return found


def modulo(number: int) -> int:
    """As int64."""
    return (number + 2**63) % 2**64 - 2**63


def test_by_hand() -> None:
    """Two rows of one word each: four numbers of two bytes are one word, the first number in its lowest bytes."""
    tensor = torch.tensor([[1, 0, 0, 0], [0, 2, 0, 0]], dtype=torch.int16).view(torch.bfloat16)
    (first, second), (column,) = factors(ROWS, 0, 2, tensor.device).tolist(), factors(COLUMNS, 0, 1, tensor.device)
    second_word = 2 * 2**16
    assert sums(tensor) == [modulo(first + second * second_word), modulo(int(column) * (1 + second_word))]
    assert first % 2 and second % 2 and first != second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (6, 8), (4, 3, 8)])
def test_shards_have_the_sums_of_the_whole(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = [fingerprint(tensor[:3], 0), fingerprint(tensor[3:4], 3), fingerprint(tensor[4:], 4)]
    assert torch.equal(sum(parts), fingerprint(tensor))
    assert fingerprint(tensor[:0]).tolist() == [0, 0]  # a rank without rows


def test_any_view_of_equal_values_has_equal_sums() -> None:
    storage = torch.randn(1 + 4 * 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    shifted = storage[1:].view(4, 8)  # begins at an address that is no multiple of 8
    assert sums(shifted) == sums(shifted.clone()) == sums(shifted.T.contiguous().T)


@pytest.mark.parametrize("width", [8, 3])
def test_equal_numbers_at_other_places_have_other_sums(width: int) -> None:
    tensor = torch.arange(width * width, dtype=torch.float32).view(width, width)
    others = [tensor.T, tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(2, 1), tensor + 1, tensor * 2]
    found = [tuple(sums(other)) for other in (tensor, *others)]
    assert len(set(found)) == len(found)
    assert sums(torch.zeros(3)) == [0, 0] != sums(-torch.zeros(3))


def test_a_number_has_a_fingerprint() -> None:
    assert sums(torch.tensor(1.5)) == sums(torch.tensor([1.5])) != sums(torch.tensor(1.25))
