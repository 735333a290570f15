"""What engines leave in a checkpoint: whole files of one process, or a folder of shards that several ranks wrote.

    model.safetensors   lora.safetensors   optimizer.pt        one process
    model_shards/       lora_shards/       optimizer_shards/   several ranks, by torch.distributed.checkpoint

Either is read into whole tensors as well as into the shards of any number of ranks. Both name weights and moments by
parameter; optimizer.pt goes by the parameters' places.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, distribute_tensor

from rloom.errors import CheckpointError

MODEL, ADAPTER, OPTIMIZER = "model", "lora", "optimizer"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
METADATA = ".metadata"  # of a folder of shards: written last
Weights = Mapping[str, Tensor]
Moments = dict[int, dict[str, Tensor]]  # by the place of their parameter


def weights_file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.safetensors"


def optimizer_file(folder: Path) -> Path:
    return folder / f"{OPTIMIZER}.pt"


def shards_of(folder: Path, kind: str) -> Path:
    return folder / f"{kind}_shards"


def cannot_write(folder: Path, error: BaseException | str) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be written: {error}; is there room on the disk?")


def write_weights(folder: Path, kind: str, weights: Weights) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    try:
        save_file(whole, weights_file(folder, kind), metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error) from error


def write_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    try:
        torch.save(optimizer.state_dict(), optimizer_file(folder))
    except (OSError, RuntimeError) as error:  # torch says RuntimeError when the disk is full
        raise cannot_write(folder, error) from error


def write_shards(folder: Path, kind: str, tensors: Weights) -> None:
    """Called on every rank. Each writes what it holds; tensors that all hold are written once."""
    try:
        save_shards({name: tensor.detach() for name, tensor in tensors.items()}, checkpoint_id=shards_of(folder, kind))
    except CheckpointException as error:
        raise cannot_write(folder, first_failure(error)) from error


def read_weights(folder: Path, kind: str, own: Weights) -> None:
    """Into `own`, which are whole tensors or the shards of a rank."""
    file, shards = weights_file(folder, kind), shards_of(folder, kind)
    if (shards / METADATA).is_file():
        check_shapes(shards, saved_shapes(shards), own)
        read_shards(shards, own)
    elif file.is_file():
        read_whole(file, own)
    else:
        raise CheckpointError(
            f"{file} is missing: the checkpoint was saved without it (checkpoint.save_contents), or with other "
            "LoRA settings; take a checkpoint that has it, or start anew with trainer.resume_mode=disable"
        )


@torch.no_grad()
def read_whole(file: Path, own: Weights) -> None:
    with safe_open(file, framework="pt") as saved:
        check_shapes(file, {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}, own)  # noqa: SIM118
        for name, tensor in own.items():
            fill(tensor, saved.get_tensor(name))


def check_shapes(file: Path, saved: Mapping[str, tuple[int, ...]], own: Weights) -> None:
    for name in (*own, *saved):
        there = str(saved[name]) if name in saved else "missing"
        here = str(tuple(own[name].shape)) if name in own else "missing"
        if there != here:
            raise CheckpointError(
                f"{file}: {name} is {there} there and {here} in this model; "
                "resume with the model it was saved from, or start anew with trainer.resume_mode=disable"
            )


def read_moments(folder: Path, own: Weights) -> Moments:
    """The moments of the parameters `own`, cut as those are. One that never had a gradient has none."""
    file, shards = optimizer_file(folder), shards_of(folder, OPTIMIZER)
    if (shards / METADATA).is_file():
        saved = saved_shapes(shards)
        moments = {place: empty_moments(p) for place, (name, p) in enumerate(own.items()) if moment(name) in saved}
        names = list(own)
        read_shards(shards, {moment(names[i], key): t for i, state in moments.items() for key, t in state.items()})
    elif file.is_file():
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state"]
        moments = {place: empty_moments(p) for place, p in enumerate(own.values()) if place in found}
        for place, state in moments.items():
            for key, tensor in state.items():
                fill(tensor, found[place][key])
    else:
        raise CheckpointError(
            f"{file} is missing: the checkpoint was saved without it; "
            "leave optimizer out of actor_rollout_ref.actor.checkpoint.load_contents to go on all the same"
        )
    return {place: {key: local(tensor) for key, tensor in state.items()} for place, state in moments.items()}


def moment(name: str, key: str = MOMENTS[0]) -> str:
    return f"{name}/{key}"


def empty_moments(parameter: Tensor) -> dict[str, Tensor]:
    step, *others = MOMENTS
    return {step: torch.zeros(()), **{key: torch.zeros_like(parameter, requires_grad=False) for key in others}}


def saved_shapes(shards: Path) -> dict[str, tuple[int, ...]]:
    found = FileSystemReader(shards).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read_shards(shards: Path, own: Weights) -> None:
    """Each rank reads what it needs, whoever wrote it, and asks nobody."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_shards({name: tensor.detach() for name, tensor in own.items()}, checkpoint_id=shards, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(
            f"{shards} cannot be read: {first_failure(error)}; take another checkpoint, "
            "or start anew with trainer.resume_mode=disable"
        ) from error


def first_failure(error: CheckpointException) -> str:
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {failure}"


def fill(own: Tensor, whole: Tensor) -> None:
    """A whole tensor, or a rank's shard, from a whole one that this process holds."""
    if isinstance(own, DTensor):
        whole = local(distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None))
    local(own).copy_(whole)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
