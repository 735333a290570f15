"""The tensors of a checkpoint: one safetensors file from one process, or a folder of shards from several ranks.

    model.safetensors   lora.safetensors   optimizer.safetensors   one process
    model_shards/       lora_shards/       optimizer_shards/       several ranks

    model_shards/rank_0.safetensors ...   the rows that each rank wrote
    model_shards/index.json               shape and dtype of each tensor, and which file holds which of its rows

Both can be read into full tensors and into the shards of any number of ranks; each rank reads only the rows it needs.
Weights are named by parameter, moments `parameter/exp_avg`. Neither format contains code: nothing is unpickled.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rloom.atomic import replace_text
from rloom.errors import CheckpointError
from rloom.hashed_files import hashed_file
from rloom.transfer import all_finite

MODEL, ADAPTER, OPTIMIZER = "model", "lora", "optimizer"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
INDEX, INDEX_VERSION = "index.json", 1
RANK_FILE = re.compile(r"rank_\d+\.safetensors")
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT = 8  # bytes, of a safetensors header
ALL = slice(None)
WAY_OUT = "take another checkpoint, or start again with trainer.resume_mode=disable"

Weights = Mapping[str, Tensor]
OwnRows = tuple[tuple[int, ...], torch.dtype, tuple[int, int]]  # shape of the whole tensor, dtype, rows
Moments = dict[int, dict[str, Tensor]]  # by the index of their parameter


@dataclass(frozen=True)
class TensorRows:
    """Rows `start` to `stop` of a tensor along its first dimension. A scalar is one row."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class SavedTensor:
    shape: tuple[int, ...]
    dtype: str  # safetensors' name for it
    pieces: Sequence[TensorRows]  # in the order of their rows, without gaps

    def shape_of(self, piece: TensorRows) -> tuple[int, ...]:
        return (piece.stop - piece.start, *self.shape[1:]) if self.shape else ()


@dataclass(frozen=True)
class Saved:
    """The saved tensors of one kind: their descriptions, without their values."""

    source: Path  # for error messages
    folder: Path  # with the files of the pieces
    tensors: Mapping[str, SavedTensor]


def weights_file(folder: Path, kind: str) -> Path:
    return folder / f"{kind}.safetensors"


def shards_of(folder: Path, kind: str) -> Path:
    return folder / f"{kind}_shards"


def moment(name: str, key: str = MOMENTS[0]) -> str:
    return f"{name}/{key}"


def cannot_write(folder: Path, error: BaseException | str) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be written: {error}; is there room on the disk?")


def damaged(file: Path, fault: object) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read: {fault}; {WAY_OUT}")


def no_weights(folder: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{weights_file(folder, kind)} is missing: the checkpoint was saved without it (checkpoint.save_contents), "
        "or with other LoRA settings; take a checkpoint that has it, or start again with trainer.resume_mode=disable"
    )


def no_moments(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{weights_file(folder, OPTIMIZER)} is missing: the checkpoint was saved without it; "
        "leave optimizer out of actor_rollout_ref.actor.checkpoint.load_contents to resume without it"
    )


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file to write."""

    file: Path
    header: Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # in the order of the file
    tensors: Iterator[tuple[str, Tensor]]  # in that order, each made when it is due; to make them may be collective

    def on_host(self, kept: dict[str, Tensor]) -> "TensorFile":
        """The same with copies in host memory: in that of the last save, where there was one."""
        names = []
        for name, tensor in self.tensors:
            if name not in kept or kept[name].shape != tensor.shape:
                kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            kept[name].copy_(tensor.detach())
            names.append(name)
        return replace(self, tensors=((name, kept[name]) for name in names))

    def write(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in self.header.items():
            start, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        with hashed_file(self.file) as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in self.tensors:
                numbers = tensor.detach().cpu().contiguous().reshape(-1)
                stream.write(numbers.view(torch.uint8).numpy().data)


class CheckpointWriter:
    """Writes the files of one engine. In the background it copies them to host memory and writes in a thread."""

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared  # ranks save together: where one cannot write, all raise
        self.writing: Future[None] | None = None
        # by tensor; kept from save to save: to write to new memory takes three times as long as the copy itself
        self.copies: dict[str, Tensor] = {}

    def write(self, folder: Path, files: Sequence[TensorFile], *, background: bool) -> None:
        if background:
            assert self.writing is None, "the loop begins no save before the last one is complete"
            copied = [file.on_host(self.copies) for file in files]
            writing: Future[None] = Future()
            self.writing = writing
            Thread(target=write_into, args=(writing, folder, copied), daemon=True).start()
            return
        failures: list[str | None] = [write_all(files)]
        if self.shared:
            failure, failures = failures[0], [None] * dist.get_world_size()
            dist.all_gather_object(failures, failure and f"rank {dist.get_rank()}: {failure}")
        for failure in failures:
            if failure is not None:
                raise cannot_write(folder, failure)

    def check(self, *, wait: bool) -> None:
        """Raise what stopped the thread. `wait`: until it has ended."""
        if self.writing is not None and (wait or self.writing.done()):
            writing, self.writing = self.writing, None
            writing.result()


def write_into(writing: "Future[None]", folder: Path, files: Sequence[TensorFile]) -> None:
    try:
        failure = write_all(files)
    except BaseException as error:
        writing.set_exception(error)
        return
    if failure is None:
        writing.set_result(None)
    else:
        writing.set_exception(cannot_write(folder, failure))


def write_all(files: Sequence[TensorFile]) -> str | None:
    """Why a file cannot be written, or None. All tensors are made in any case, since that may be collective."""
    failure = None
    for file in files:
        try:
            if failure is None:
                file.write()
        except OSError as error:
            failure = str(error)
        finally:
            for _ in file.tensors:
                pass
    return failure


def whole_file(folder: Path, kind: str, tensors: Weights) -> TensorFile:
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps each aligned
    header = {name: (tuple(tensors[name].shape), tensors[name].dtype) for name in order}
    return TensorFile(weights_file(folder, kind), header, ((name, tensors[name]) for name in order))


def shard_file(folder: Path, kind: str, tensors: Weights) -> tuple[TensorFile, list[Path]]:
    """Called on every rank. Each writes its rows to its own file; replicated rows are written by one rank."""
    own = {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if is_writer(tensor, number)}
    rows = {name: (tuple(tensor.shape), tensor.dtype, rows_of(tensor)) for name, tensor in own.items()}
    files = write_index(folder, kind, rows)
    shards = whole_file(folder, kind, {name: local(tensor) for name, tensor in own.items()})
    return replace(shards, file=files[dist.get_rank()]), files


def write_index(folder: Path, kind: str, own: Mapping[str, OwnRows]) -> list[Path]:
    """Called on every rank, with the rows that it will write. Rank 0 writes the index. Returns all their files."""
    names = [f"rank_{rank}.safetensors" for rank in range(dist.get_world_size())]
    shards = shards_of(folder, kind)
    entries: dict[str, dict[str, Any]] = {
        name: {
            "shape": list(shape),
            "dtype": DTYPES[dtype],
            "pieces": [asdict(TensorRows(names[dist.get_rank()], *rows))],
        }
        for name, (shape, dtype, rows) in own.items()
    }
    gathered: list[Any] = [None] * len(names)
    dist.all_gather_object(gathered, entries)
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        joined: dict[str, dict[str, Any]] = {}
        for by_name in gathered:
            for name, entry in by_name.items():
                joined.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
        try:
            shards.mkdir(exist_ok=True)
            replace_text(shards / INDEX, json.dumps({"version": INDEX_VERSION, "tensors": joined}))
        except OSError as error:
            failure = [f"rank 0: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise cannot_write(folder, failure[0])
    return [shards / name for name in names]


def is_writer(tensor: Tensor, number: int) -> bool:
    """Whether this rank writes its rows of a tensor. Replicas take turns, so that each writes an equal part."""
    if not isinstance(tensor, DTensor):
        return number % dist.get_world_size() == dist.get_rank()
    start, stop = rows_of(tensor)
    replicated = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank of the engine is in its mesh
    return start < stop and all(coordinate[axis] == number % tensor.device_mesh.size(axis) for axis in replicated)


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """The rows of the full tensor that this process holds: all, or those of its shard."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return 0, rows
    sharded = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Shard)]
    assert all(placement in (Replicate(), Shard(0)) for placement in tensor.placements) and len(sharded) <= 1
    if not sharded:
        return 0, rows
    each = -(-rows // tensor.device_mesh.size(sharded[0]))  # FSDP2 shards like torch.chunk
    start = min(tensor.device_mesh.get_local_rank(sharded[0]) * each, rows)
    return start, start + tensor.to_local().shape[0]


def read_weights(folder: Path, kind: str, own: Weights) -> None:
    """Read into `own`: full tensors, or the shards of a rank."""
    saved = find_saved(folder, kind)
    if saved is None:
        raise no_weights(folder, kind)
    check_shapes(saved, own)
    read_tensors(saved, own)


def read_moments(folder: Path, own: Weights) -> Moments:
    """The moments of the parameters `own`, sharded like them. Parameters without saved moments get none."""
    saved = find_saved(folder, OPTIMIZER)
    if saved is None:
        raise no_moments(folder)
    moments = {position: empty_moments(p) for position, (name, p) in enumerate(own.items()) if has_moments(saved, name)}
    names = list(own)
    targets = {moment(names[i], key): tensor for i, state in moments.items() for key, tensor in state.items()}
    check_shapes(saved, targets)
    read_tensors(saved, targets)
    return {position: {key: local(tensor) for key, tensor in state.items()} for position, state in moments.items()}


def has_moments(saved: Saved, name: str) -> bool:
    return any(moment(name, key) in saved.tensors for key in MOMENTS)


def empty_moments(parameter: Tensor) -> dict[str, Tensor]:
    step, *others = MOMENTS
    return {step: torch.zeros(()), **{key: torch.zeros_like(parameter, requires_grad=False) for key in others}}


def find_saved(folder: Path, kind: str) -> Saved | None:
    file, shards = weights_file(folder, kind), shards_of(folder, kind)
    if shards.is_dir():
        return read_index(shards)
    if not file.is_file():
        return None
    with open_tensors(file) as stored:
        tensors = {}
        for name in stored.keys():  # noqa: SIM118
            part = stored.get_slice(name)
            shape = tuple(part.get_shape())
            tensors[name] = SavedTensor(shape, part.get_dtype(), [TensorRows(file.name, 0, shape[0] if shape else 1)])
    return Saved(file, folder, tensors)


def check_folder(folder: Path) -> None:
    """Check that the header of every tensor file in a role's folder can be read. Values are not read."""
    for file in (*folder.glob("*.safetensors"), *folder.glob("*_shards/*.safetensors")):
        with open_tensors(file):
            pass
    for shards in folder.glob("*_shards"):
        saved = read_index(shards)
        for tensor in saved.tensors.values():
            for piece in tensor.pieces:
                if not (shards / piece.file).is_file():
                    raise damaged(shards / piece.file, "it is missing")


def read_index(shards: Path) -> Saved:
    file = shards / INDEX
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["version"] != INDEX_VERSION:
            raise ValueError(f"its version is {content['version']!r}; this rloom reads version {INDEX_VERSION}")
        tensors = {str(name): saved_tensor(str(name), entry) for name, entry in content["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}") from error
    return Saved(file, shards, tensors)


def saved_tensor(name: str, entry: Any) -> SavedTensor:
    """Parse an entry of an index: ValueError, KeyError or TypeError if `write_index` cannot have written it."""
    shape = tuple(whole_number(size) for size in entry["shape"])
    if entry["dtype"] not in DTYPES.values():
        raise ValueError(f"{name} has dtype {entry['dtype']!r}")
    pieces = [
        TensorRows(str(one["file"]), whole_number(one["start"]), whole_number(one["stop"])) for one in entry["pieces"]
    ]
    pieces.sort(key=lambda piece: piece.start)
    if len({piece.file for piece in pieces}) < len(pieces):
        raise ValueError(f"{name} is twice in one file")
    end = 0
    for piece in pieces:
        if not RANK_FILE.fullmatch(piece.file):
            raise ValueError(f"{name} is in {piece.file!r}, which is not the file of a rank")
        if piece.start != end or piece.stop <= piece.start:
            raise ValueError(f"{name}: rows {piece.start} to {piece.stop} do not follow row {end}")
        end = piece.stop
    if end != (shape[0] if shape else 1):
        raise ValueError(f"{name}: the files hold {end} rows of a tensor of shape {shape}")
    return SavedTensor(shape, entry["dtype"], pieces)


def whole_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def check_shapes(saved: Saved, own: Weights) -> None:
    for name in (*own, *saved.tensors):
        in_file = str(saved.tensors[name].shape) if name in saved.tensors else "missing"
        in_model = str(tuple(own[name].shape)) if name in own else "missing"
        if in_file != in_model:
            raise CheckpointError(
                f"{saved.source}: {name} is {in_file} there and {in_model} in this model; "
                "resume with the model it was saved from, or start again with trainer.resume_mode=disable"
            )


@torch.no_grad()
def read_tensors(saved: Saved, own: Weights) -> None:
    """Read the rows that this process holds, whichever ranks wrote them. Not a collective."""
    targets: dict[str, list[tuple[str, TensorRows]]] = {}  # by file, so that each is opened once
    for name, tensor in own.items():
        start, stop = rows_of(tensor)
        for piece in saved.tensors[name].pieces:
            if piece.start < stop and start < piece.stop:
                targets.setdefault(piece.file, []).append((name, piece))
    for file, parts in targets.items():
        with open_tensors(saved.folder / file) as stored:
            names = set(stored.keys())
            for name, piece in parts:
                if name not in names:
                    raise damaged(saved.folder / file, f"it does not hold {name}")
                read_piece(saved.folder / file, stored, name, saved.tensors[name], piece, own[name])


def read_piece(file: Path, stored: Any, name: str, saved: SavedTensor, piece: TensorRows, own: Tensor) -> None:
    part = checked_slice(file, stored, name, saved, piece)
    target = local(own)
    if not saved.shape:
        target.copy_(finite(file, name, stored.get_tensor(name)))
        return
    start, stop = rows_of(own)
    first, last = max(start, piece.start), min(stop, piece.stop)
    rows = finite(file, name, part[first - piece.start : last - piece.start])
    target[first - start : last - start].copy_(rows)


def finite(file: Path, name: str, values: Tensor) -> Tensor:
    """With NaN in the weights every answer is empty or noise; with NaN in the optimizer they are there in one step."""
    if not all_finite(values):
        raise damaged(file, f"{name} has NaN or infinite numbers")
    return values


@torch.no_grad()
def read_part(saved: Saved, name: str, index: Sequence[int | slice]) -> Tensor:
    """A part of a saved tensor, whichever ranks wrote its rows. `index`: of its first dimensions."""
    if name not in saved.tensors:
        raise damaged(saved.source, f"it does not hold {name}")
    tensor = saved.tensors[name]
    first = index[0] if index else ALL
    rows = range(tensor.shape[0] if tensor.shape else 1)
    wanted = rows[first] if isinstance(first, slice) else range(first, first + 1)
    parts = []
    for piece in tensor.pieces:
        start, stop = max(wanted.start, piece.start), min(wanted.stop, piece.stop)
        if start < stop:
            file = saved.folder / piece.file
            with open_tensors(file) as stored:
                part = checked_slice(file, stored, name, tensor, piece)
                if not tensor.shape:
                    return finite(file, name, stored.get_tensor(name))
                rows = part[(slice(start - piece.start, stop - piece.start), *index[1:])]
                parts.append(finite(file, name, rows))
    found = torch.cat(parts)
    return found[0] if isinstance(first, int) else found


def checked_slice(file: Path, stored: Any, name: str, saved: SavedTensor, piece: TensorRows) -> Any:
    part = stored.get_slice(name)
    found = tuple(part.get_shape()), part.get_dtype()
    if found != (saved.shape_of(piece), saved.dtype) or saved.dtype not in DTYPES.values():
        raise damaged(file, f"{name} is {found[1]} {found[0]} instead of {saved.dtype} {saved.shape_of(piece)}")
    return part


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file; faults become CheckpointErrors that name it."""
    if not file.is_file():
        raise damaged(file, "it is missing")
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except (OSError, SafetensorError, ValueError) as error:
        raise damaged(file, error) from error


def copy_full(own: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `own`, which is a full tensor or this rank's shard."""
    if isinstance(own, DTensor):
        full = local(distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None))
    local(own).copy_(full)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
