"""Checkpoints of a Megatron engine in the format of storage.py: whole tensors under the names of transformers.

Any other engine, and any other split, reads them. The ranks of a stage take turns in writing its tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rloom.engines.distributed import all_reduce_max
from rloom.engines.megatron.flat import FlatParameters
from rloom.engines.megatron.layout import Parameter
from rloom.engines.megatron.optimizer import MOMENTS, DistributedAdamW
from rloom.engines.megatron.weights import ReadPart, StageWeights
from rloom.engines.storage import (
    MODEL,
    OPTIMIZER,
    cannot_write,
    check_shapes,
    find_saved,
    moment,
    no_moments,
    no_weights,
    read_part,
    tensor_file,
    write_own,
)

Tensors = Iterable[tuple[str, Tensor]]


def write_model(folder: Path, weights: StageWeights, flats: list[FlatParameters]) -> None:
    values: dict[str, Tensor] = {}
    for flat in flats:
        assert flat.master is not None
        values |= flat.gather(flat.master.detach())
    names = weights.names(weights.stage)
    write_tensors(folder, MODEL, weights, {name: weights.shapes[name] for name in names}, weights.whole(values))


def write_moments(folder: Path, weights: StageWeights, optimizer: DistributedAdamW) -> None:
    steps = optimizer.steps
    names = weights.names(weights.stage) if steps is not None else []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key in MOMENTS if names else ():
            for name, tensor in weights.whole(optimizer.moments(key)):
                yield moment(name, key), tensor
        for name in names:
            assert steps is not None
            yield moment(name), steps

    shapes = {moment(name, key): weights.shapes[name] for key in MOMENTS for name in names}
    write_tensors(folder, OPTIMIZER, weights, shapes | {moment(name): () for name in names}, tensors())


def write_tensors(
    folder: Path, kind: str, weights: StageWeights, shapes: Mapping[str, tuple[int, ...]], tensors: Tensors
) -> None:
    """`tensors`: those of this rank's stage, in the order of `shapes`, float32; every rank of the stage has them."""
    if all_reduce_max(int(not folder.is_dir())):
        raise cannot_write(folder, "not every rank sees that folder; checkpoints need a disk that all nodes share")
    ranks, rank = weights.groups.stage.size(), weights.groups.stage.rank()
    own = {name: shape for number, (name, shape) in enumerate(shapes.items()) if number % ranks == rank}

    def write(file: Path) -> None:
        opened, left = tensor_file(file, {name: (shape, torch.float32) for name, shape in own.items()}), iter(tensors)
        try:
            with opened as write_one:
                for name, tensor in left:
                    if name in own:
                        write_one(tensor.float())
        finally:
            for _ in left:  # whatever failed here: gathering them is collective
                pass

    rows = {name: (shape, torch.float32, (0, shape[0] if shape else 1)) for name, shape in own.items()}
    write_own(folder, kind, rows, write)


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
