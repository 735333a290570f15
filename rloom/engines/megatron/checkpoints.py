"""Checkpoints of a Megatron engine in the format of storage.py: whole tensors under the names of transformers.

Any other engine, and any other split, reads them. The ranks of a stage take turns in writing its tensors.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.engines.distributed import all_reduce_max
from rloom.engines.megatron.flat import FlatParameters, Gather
from rloom.engines.megatron.layout import Parameter
from rloom.engines.megatron.optimizer import MOMENTS, DistributedAdamW
from rloom.engines.megatron.weights import ReadPart, StageWeights
from rloom.engines.storage import (
    MODEL,
    OPTIMIZER,
    TensorFile,
    cannot_write,
    check_shapes,
    find_saved,
    moment,
    no_moments,
    no_weights,
    read_part,
    write_index,
)

Saved = tuple[TensorFile, list[Path]]  # this rank's file, and those of all ranks


def model_file(folder: Path, weights: StageWeights, flats: list[FlatParameters]) -> Saved:
    def masters() -> dict[str, Gather]:
        found: dict[str, Gather] = {}
        for flat in flats:
            assert flat.master is not None
            found |= flat.gatherers(flat.master.detach())
        return found

    names = weights.names(weights.stage)
    shapes = {name: weights.shapes[name] for name in names}
    return stage_file(folder, MODEL, weights, shapes, weights.whole(GatheredValues(masters())))


def moments_file(folder: Path, weights: StageWeights, optimizer: DistributedAdamW) -> Saved:
    steps = optimizer.steps
    names = weights.names(weights.stage) if steps is not None else []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key in MOMENTS if names else ():
            for name, tensor in weights.whole(GatheredValues(optimizer.moments(key))):
                yield moment(name, key), tensor
        for name in names:
            assert steps is not None
            yield moment(name), steps

    shapes = {moment(name, key): weights.shapes[name] for key in MOMENTS for name in names}
    return stage_file(folder, OPTIMIZER, weights, shapes | {moment(name): () for name in names}, tensors())


def stage_file(
    folder: Path,
    kind: str,
    weights: StageWeights,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, Tensor]],
) -> Saved:
    """`tensors`: those of this rank's stage, in the order of `shapes`; every rank of the stage makes them."""
    if all_reduce_max(int(not folder.is_dir())):
        raise cannot_write(folder, "not every rank sees that folder; checkpoints need a disk that all nodes share")
    ranks, rank = weights.groups.stage.size(), weights.groups.stage.rank()
    own = {name: shape for number, (name, shape) in enumerate(shapes.items()) if number % ranks == rank}
    rows = {name: (shape, torch.float32, (0, shape[0] if shape else 1)) for name, shape in own.items()}
    files = write_index(folder, kind, rows)
    header = {name: (shape, torch.float32) for name, shape in own.items()}
    written = ((name, tensor.float()) for name, tensor in tensors if name in own)
    return TensorFile(files[dist.get_rank()], header, written), files


class GatheredValues(Mapping[str, Tensor]):
    """Parameters, or moments of them, gathered from the ranks when one is read: they never exist all at once."""

    def __init__(self, gatherers: Mapping[str, Gather]) -> None:
        self.gatherers = gatherers

    def __getitem__(self, name: str) -> Tensor:
        return self.gatherers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.gatherers)

    def __len__(self) -> int:
        return len(self.gatherers)


def read_checkpoint(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> ReadPart:
    saved = find_saved(folder, MODEL)
    if saved is None:
        raise no_weights(folder, MODEL)
    check_shapes(saved, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    return lambda name, index: read_part(saved, name, index)


def read_moments(
    folder: Path, weights: StageWeights, parameters: Mapping[str, Parameter], optimizer: DistributedAdamW
) -> None:
    saved = find_saved(folder, OPTIMIZER)
    if saved is None:
        raise no_moments(folder)
    if not saved.tensors:  # saved before the first step
        return
    first = next(iter(weights.shapes))

    def read(name: str, key: str) -> Tensor:
        return weights.read(parameters[name], lambda tensor, index: read_part(saved, moment(tensor, key), index))

    optimizer.load(read_part(saved, moment(first), ()), read)
