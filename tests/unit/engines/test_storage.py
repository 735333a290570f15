"""Tensor files that the safetensors library reads, written one tensor at a time."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from rloom.engines.storage import (
    CheckpointWriter,
    SavedTensor,
    TensorRows,
    find_saved,
    read_tensors,
    saved_tensor,
    whole_file,
)
from rloom.errors import CheckpointError
from tests.helpers import assert_identical

TENSORS: dict[str, Tensor] = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "matrix": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "step": torch.tensor(7.0),
    "empty": torch.zeros(0, 4),
    "exact": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "transposed": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,
}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    whole_file(tmp_path, "a", TENSORS).write()
    assert_identical(load_file(tmp_path / "a.safetensors"), TENSORS)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers loads no file without it
        assert {name: file.get_slice(name).get_dtype() for name in file.keys()} == {  # noqa: SIM118
            "odd": "BF16",
            "matrix": "F32",
            "step": "F32",
            "empty": "F32",
            "exact": "F64",
            "transposed": "F16",
        }


def test_nothing_is_a_file_too(tmp_path: Path) -> None:
    whole_file(tmp_path, "a", {}).write()
    assert load_file(tmp_path / "a.safetensors") == {}


def test_what_is_written_is_read_into_other_precisions(tmp_path: Path) -> None:
    whole_file(tmp_path, "model", TENSORS).write()
    saved = find_saved(tmp_path, "model")
    assert saved is not None
    own = {name: torch.full_like(tensor, -1, dtype=torch.float32) for name, tensor in TENSORS.items()}
    read_tensors(saved, own)
    assert_identical(own, {name: tensor.float() for name, tensor in TENSORS.items()})


def test_an_entry_of_an_index_is_in_the_order_of_its_rows() -> None:
    pieces = [
        {"file": "rank_1.safetensors", "start": 2, "stop": 3},
        {"file": "rank_0.safetensors", "start": 0, "stop": 2},
    ]
    found = saved_tensor("w", {"shape": [3, 5], "dtype": "F32", "pieces": pieces})
    expected = [TensorRows("rank_0.safetensors", 0, 2), TensorRows("rank_1.safetensors", 2, 3)]
    assert found == SavedTensor((3, 5), "F32", expected)
    assert [found.shape_of(piece) for piece in expected] == [(2, 5), (1, 5)]


def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(CheckpointError, match=r"nowhere cannot be written: .*is there room on the disk\?"):
        CheckpointWriter().write(folder, [whole_file(folder, "model", TENSORS)], background=False)
