"""Parts of the tensors of a published model, read from its safetensors files without loading the model.

Tensors are named as transformers names the parameters of the model. It keeps the experts of a layer in one tensor,
[experts, rows, columns]; the files have one for each expert.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from rloom.errors import ModelError
from rloom.models.source import ModelSource
from rloom.transfer import all_finite

Index = Sequence[int | slice]


@dataclass(frozen=True)
class ExpertNames:
    """The names in the files for the parts of a family's expert tensors."""

    block: str  # name of the layer's part with the experts, `mlp` in transformers
    gate: str
    up: str
    down: str


EXPERTS = {
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}


class WeightFiles:
    def __init__(self, source: ModelSource, family: str, expert_rows: int = 0) -> None:
        """`expert_rows`: of an expert's up projection."""
        self.source, self.experts, self.expert_rows = source, EXPERTS.get(family), expert_rows
        self.file_of = files_by_tensor(source)

    def read(self, name: str, index: Index) -> Tensor:
        """`index` has an entry for each of the first dimensions."""
        if name not in self.file_of and self.experts is not None:
            name, index = self.expert_tensor(name, index, self.experts)
        if name not in self.file_of:
            raise ModelError(f"{self.source.key}={self.source.path}: its safetensors files have no {name}")
        file = self.file_of[name]
        try:
            with safe_open(file, framework="pt") as stored:
                part: Tensor = stored.get_slice(name)[tuple(index)]
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.source.key}={self.source.path}: {file} cannot be read: {error}") from error
        if not all_finite(part):
            raise ModelError(not_finite(f"{self.source.key}={self.source.path}", [name]))
        return part

    def expert_tensor(self, name: str, index: Index, names: ExpertNames) -> tuple[str, Index]:
        """The name in the files, and the index in that tensor."""
        layer, _, inner = name.partition(".mlp.")
        prefix = f"{layer}.{names.block}"
        if not inner.startswith("experts."):
            return f"{prefix}.{inner}", index
        expert, rows, columns = index
        assert isinstance(rows, slice)
        if inner == "experts.down_proj":
            return f"{prefix}.experts.{expert}.{names.down}.weight", (rows, columns)
        is_up = rows.start >= self.expert_rows
        shift = self.expert_rows if is_up else 0
        rows = slice(rows.start - shift, rows.stop - shift)
        return f"{prefix}.experts.{expert}.{names.up if is_up else names.gate}.weight", (rows, columns)


def not_finite(where: str, tensors: Sequence[str]) -> str:
    others = f", as {len(tensors) - 1} other tensors," if len(tensors) > 1 else ""
    return f"{where}: {tensors[0]} in the weights{others} has NaN or infinite numbers; use another copy or checkpoint"


def stored_dtype(source: ModelSource) -> torch.dtype:
    """The dtype of all weights in the files; float32 if they have several, or none that can be read here."""
    try:
        files = {*files_by_tensor(source).values()}
    except ModelError:
        return torch.float32
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as stored:
            found |= {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get("/".join(found), torch.float32)


def files_by_tensor(source: ModelSource) -> dict[str, Path]:
    listed = find(source, "model.safetensors.index.json")
    if listed is not None:
        entries: dict[str, str] = json.loads(listed.read_text(encoding="utf-8"))["weight_map"]
        files = {name: find(source, name) for name in set(entries.values())}
        return {tensor: file for tensor, name in entries.items() if (file := files[name]) is not None}
    single = find(source, "model.safetensors")
    if single is None:
        raise ModelError(
            f"{source.key}={source.path}: it has no safetensors files, from which each rank reads its part of the "
            "weights; save the model with transformers' save_pretrained first, or use the strategy fsdp2"
        )
    with safe_open(single, framework="pt") as stored:
        return dict.fromkeys(stored.keys(), single)


def find(source: ModelSource, name: str) -> Path | None:
    """In a folder, or downloaded from the hub."""
    found = cached_file(
        source.location,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
