"""The engine of several processes: one rank's shard of a model, gathered layer by layer (FSDP2).

Between passes a rank holds its shard of the float32 weights, their gradient and their moments. A pass all-gathers the
weights in the dtype of the forward pass and reduces gradients in float32. Every pass, optimizer step, save and
iteration over `weights` is collective: all ranks of the mesh call it in the same order. A single rank runs the same
code.

Rank 0 alone reads the model and broadcasts the weights into the shards of all ranks, one at a time. The other ranks
create the network on the meta device, so a host holds one copy of a trained model in memory, not one for each of its
GPUs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Objective
from rloom.batch import Batch, TokenOutputs, TrainBatch
from rloom.engines.base import AdamW, Engine, Placement, TensorSpec, Update, dtype_name
from rloom.engines.distributed import SHARDS, all_gather_rows, all_reduce_max, all_reduce_norm
from rloom.engines.fingerprint import fingerprint, stacked
from rloom.engines.micro_batches import (
    MicroBatches,
    Tally,
    accumulate_gradients,
    dummy_pass,
    score_batches,
    split_batch,
    zero_loss,
)
from rloom.engines.optim import clip_and_step, load_moments, make_optimizer, move_moments, read_update
from rloom.engines.storage import (
    ADAPTER,
    MODEL,
    OPTIMIZER,
    CheckpointWriter,
    cannot_write,
    copy_full,
    local,
    moment,
    read_moments,
    read_weights,
    shard_file,
)
from rloom.engines.ulysses import SequenceParallelGroup, sequence_parallel_outputs
from rloom.models.limits import UNREDUCED_SHARE
from rloom.models.load import allocate
from rloom.models.network import ALL, LossFn, Network, Reference
from rloom.packing import MicroBatching, RowPrompt

Result = TypeVar("Result", bound=tuple[Tensor | None, ...])


class FSDPRoot(nn.Module):
    """The root FSDP module. While its forward runs, embeddings and head are gathered; each layer gathers itself.

    Its argument is a function, not tensors: FSDP would move tensors to the device, and lengths and masks stay on the
    host.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Result]) -> Result:
        return compute()


class FSDPEngine:
    def __init__(
        self,
        network: Network,  # with weights on every rank, or on rank 0 only, which then broadcasts them
        placement: Placement,
        mesh: DeviceMesh,  # from rank_mesh
        *,
        scoring: MicroBatching,
        training: MicroBatching | None = None,
        optimizer: AdamW | None = None,  # None: it is scored, never trained
        reference: Engine | None = None,  # for a KL over the whole vocabulary; None: itself, adapter off
        compiled: bool = False,
        sequence_group: SequenceParallelGroup | None = None,  # ranks that get the same samples and split their tokens
    ) -> None:
        self.network, self.placement, self.device, self.mesh = network, placement, placement.device, mesh
        self.scoring, self.training = scoring, training
        self.sequence_group = sequence_group
        self.reference: Engine = reference or self
        self.module = network.module
        self.adamw = optimizer
        self.writer = CheckpointWriter(shared=True)
        self.tally = Tally()  # sums over the batches whose gradient is accumulated
        trainable = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.kind = MODEL if len(trainable) == sum(1 for _ in self.module.parameters()) else ADAPTER
        self.dtypes = self.cast_frozen()
        if compiled and placement.device.type == "cuda":
            network.compile()
        read = weights_to_broadcast(self.module)
        for parameter in self.module.parameters():
            if parameter.requires_grad:  # what was read has the dtype of the model's files
                parameter.data = parameter.data.to(torch.float32)
        self.root = self.shard()
        if read is not None:
            assert isinstance(self.root, nn.Module)
            allocate_shards(self.root, self.placement.storage_device)
        self.parameters: dict[str, DTensor] = sharded_parameters(self.module)
        if read is not None:
            broadcast_weights(read, self.module, placement.device)
        self.trainable = {name: self.parameters[name] for name in trainable}
        gradient = 4 * sum(parameter.numel() for parameter in self.trainable.values())
        # one decision for all ranks, even if their GPUs differ
        self.reduces_once = not all_reduce_max(int(gradient > UNREDUCED_SHARE * memory_of(placement.device)))
        self.masters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            # plain tensors that share the shards' memory: an optimizer step needs no communication
            self.masters = {name: nn.Parameter(local(p.detach())) for name, p in self.trainable.items()}
            self.optimizer = make_optimizer(self.masters.values(), optimizer)
        # FSDP fixes its root and the parameters that have gradients in its first forward pass, so run one now
        self.reshard()

    def cast_frozen(self) -> dict[str, torch.dtype]:
        """Cast frozen parameters to the dtype of the forward pass. Returns it for each, and that of buffers."""
        exact = {id(p) for module in self.network.exact for p in module.parameters()}
        named = list(self.module.named_parameters())
        dtypes = {name: torch.float32 if id(p) in exact else self.placement.dtype for name, p in named}
        for name, parameter in named:
            if self.adamw is None:
                parameter.requires_grad_(False)
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtypes[name])
        return dtypes | {name: buffer.dtype for name, buffer in self.module.named_buffers()}

    def shard(self) -> FSDPModule:
        """Each layer is an FSDP unit, so is each module that stays float32; the root has all other parameters."""
        offload = OffloadPolicy() if self.placement.storage_device == self.device else CPUOffloadPolicy()
        root = FSDPRoot(self.module)
        for module in (*self.network.exact, *self.network.layers, root):
            dtype = torch.float32 if module in self.network.exact else self.placement.dtype
            unit = fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=self.is_sharded and module is not root,
                mp_policy=MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
                offload_policy=offload,
            )
            if self.mesh.size() > 1:  # with one rank, FSDP would run an extra kernel that divides by 1
                # each rank's loss is a share of the mini-batch's loss, so gradients are summed, not averaged
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)
        for part in root.modules():
            # torch.compile treats every number of a module with this mark (the head size) as dynamic, which makes
            # rotary kernels ten times as slow; nothing here depends on the mark
            part._is_fsdp_managed_module = False  # type: ignore[assignment]
        assert isinstance(root, FSDPModule)
        return root

    @property
    def is_sharded(self) -> bool:
        """Whether resharding frees memory. A rank that holds all weights skips it."""
        return bool(self.mesh[SHARDS].size() > 1)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def description(self) -> str:
        copies = self.mesh.size() // self.mesh[SHARDS].size()
        return f"FSDP2 over {self.mesh.size()} ranks, {copies} copies, {self.placement.description}"

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()  # FSDP copies offloaded shards to the device as it gathers them

    @contextmanager
    def as_reference(self) -> Iterator[Reference]:
        yield FSDPReference(self)
        self.reshard()

    def score_reference(self, batch: Batch) -> Tensor:
        with self.network.without_adapter():
            return self.score(batch)

    def score(self, batch: Batch) -> Tensor:
        self.module.eval()
        micro_batches = split_batch(batch, self.scoring, self.device, self.prompts(batch))
        most = all_reduce_max(len(micro_batches))
        output_T = score_batches(micro_batches, self.outputs)
        with torch.no_grad():
            for _ in range(len(micro_batches), most):
                self.outputs(*dummy_pass(self.device))
        self.reshard()
        return output_T

    def prompts(self, batch: Batch) -> list[RowPrompt] | None:
        return self.network.decoder.prompts(batch) if self.sequence_group is None else None

    def outputs(self, host_batch: Batch, device_batch: Batch) -> TokenOutputs:
        def compute() -> tuple[Tensor, Tensor | None]:
            found = (
                self.network.token_outputs(host_batch, device_batch)
                if self.sequence_group is None
                else sequence_parallel_outputs(self.network, host_batch, device_batch, self.sequence_group)
            )
            # FSDP finds the tensors of an output in tuples, not in a dataclass
            return found.output_T, found.entropy_T

        return TokenOutputs(*self.call_root(compute))

    def loss(
        self,
        host_batch: Batch,
        device_batch: Batch,
        loss_fn: LossFn,
        *,
        entropy_gradient: bool,
        reference: Reference | None,
    ) -> Tensor:
        def compute() -> tuple[Tensor]:
            found = self.network.loss(
                host_batch, device_batch, loss_fn, entropy_gradient=entropy_gradient, reference=reference
            )
            return (found,)

        def compute_shared(sequence_group: SequenceParallelGroup) -> tuple[Tensor]:
            """All outputs are gathered first: a loss may need all tokens of a sample, and each rank has only some."""
            assert reference is None  # config/checks.py refuses a KL over the vocabulary with sequence parallelism
            found = sequence_parallel_outputs(
                self.network, host_batch, device_batch, sequence_group, entropy_gradient=entropy_gradient
            )
            return (loss_fn(found, ALL, ALL),)

        shared = self.sequence_group
        return self.call_root(compute if shared is None else partial(compute_shared, shared))[0]

    def call_root(self, compute: Callable[[], Result]) -> Result:
        assert isinstance(self.root, nn.Module)
        found: Result = self.root(compute)
        return found

    def reshard(self) -> None:
        """Free what passes have gathered.

        FSDP frees the root's weights, and clears the order of forward passes that it prefetches by, only at the end of
        a backward pass. Scoring has none. So run the smallest one: through the root, on a scalar that no weight
        depends on, hence without any communication. `FSDPModule.reshard` would free the weights and keep the order.
        """
        with torch.enable_grad():
            scalar = torch.zeros((), device=self.device, requires_grad=True)
            self.call_root(lambda: (scalar * 1.0,))[0].backward()

    def forward_backward(self, batch: TrainBatch, objective: Objective, counts: Counts) -> None:
        assert self.training is not None  # required with an optimizer
        self.network.decoder.train()
        micro_batches = split_batch(batch, self.training, self.device, self.prompts(batch))
        most = all_reduce_max(len(micro_batches))
        with self.compared(objective) as reference:
            loss = partial(self.loss, entropy_gradient=objective.needs_entropy_gradient, reference=reference)
            passes = self.reduce_in_last(micro_batches, most)
            accumulate_gradients(passes, loss, self.tally.begin(objective, counts, micro_batches))
            for number in range(len(micro_batches), most):  # every rank runs as many passes: they are collective
                self.begin_pass(last=number == most - 1)
                loss(*dummy_pass(self.device), zero_loss).backward()

    def compared(self, objective: Objective) -> AbstractContextManager[Reference | None]:
        """The reference for a KL over the whole vocabulary, if the objective has one."""
        if not objective.needs_full_kl:
            return nullcontext()
        # its own root is gathered already while it runs
        return nullcontext(self.network.as_reference()) if self.reference is self else self.reference.as_reference()

    def reduce_in_last(
        self, micro_batches: MicroBatches[TrainBatch], most: int
    ) -> Iterator[tuple[TrainBatch, TrainBatch]]:
        """Gradients are accumulated unsharded and reduced in the last of `most` passes; without the memory for that,
        in each pass."""
        for number, one in enumerate(micro_batches):
            self.begin_pass(last=number == most - 1)
            yield one

    def begin_pass(self, *, last: bool) -> None:
        self.root.set_requires_gradient_sync(last or not self.reduces_once)
        self.root.set_reshard_after_backward(last or self.is_sharded)

    def optim_step(self, learning_rate: float) -> Update:
        assert self.optimizer is not None and self.adamw is not None
        for name, parameter in self.trainable.items():
            gradient, parameter.grad = parameter.grad, None
            self.masters[name].grad = None if gradient is None else local(gradient)
        visiting = self.placement.offload_optimizer and not self.placement.offload_parameters
        if visiting:
            move_moments(self.optimizer, self.device)
        norm = clip_and_step(
            self.optimizer,
            self.masters.values(),
            self.adamw,
            learning_rate,
            whole_norm=partial(all_reduce_norm, mesh=self.mesh),
        )
        if visiting:
            move_moments(self.optimizer, torch.device("cpu"))
        tally, self.tally = self.tally, Tally()
        return read_update(norm, tally)

    def sent(self, frozen: bool) -> Mapping[str, Tensor]:
        """Parameters are sharded, buffers are whole on each rank."""
        return {**self.parameters, **dict(self.module.named_buffers())} if frozen else self.trainable

    @torch.no_grad()
    def weights(self, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.sent(frozen).items():
            own = local(tensor).to(self.device, self.dtypes[name])  # cast first: fewer bytes to gather
            yield name, all_gather_rows(own, len(tensor), self.mesh) if isinstance(tensor, DTensor) else own

    def manifest(self, frozen: bool = False) -> list[TensorSpec]:
        return [TensorSpec(name, [*t.shape], dtype_name(self.dtypes[name])) for name, t in self.sent(frozen).items()]

    @torch.no_grad()
    def fingerprints(self, frozen: bool = False) -> Tensor:
        """The sums of each rank's rows, summed over the ranks: no weights are gathered. Rank 0 adds the buffers."""
        group, own = self.mesh[SHARDS], []
        rank = group.get_local_rank()
        for name, tensor in self.sent(frozen).items():
            part, first_row = local(tensor).to(self.device, self.dtypes[name]), 0
            if isinstance(tensor, DTensor):
                first_row = rank * -(-len(tensor) // group.size())
            elif rank > 0:
                part = part.new_empty(0)
            own.append(fingerprint(part, first_row))
        sums_P2 = stacked(own)
        if group.size() > 1:
            dist.all_reduce(sums_P2, group=group.get_group())
        return sums_P2

    def save(self, folder: Path, contents: frozenset[str], background: bool = False) -> list[Path]:
        if all_reduce_max(int(not folder.is_dir())):
            raise cannot_write(folder, "not every rank sees that folder; checkpoints need a disk that all nodes share")
        saved = [shard_file(folder, self.kind, self.trainable)] if "model" in contents else []
        if "optimizer" in contents and self.optimizer is not None:
            saved.append(shard_file(folder, OPTIMIZER, self.moments()))
        self.writer.write(folder, [own for own, _ in saved], background=background)
        return [file for _, files in saved for file in files]

    def check_save(self, wait: bool) -> None:
        self.writer.check(wait=wait)

    def moments(self) -> dict[str, Tensor]:
        """The shards of the moments by name. The step counts are equal on every rank."""
        assert self.optimizer is not None
        found: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            for key, value in self.optimizer.state.get(self.masters[name], {}).items():
                found[moment(name, key)] = value if value.dim() == 0 else like(parameter, value)
        return found

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        if "model" in contents:
            read_weights(folder, self.kind, self.trainable)
        if "optimizer" in contents and self.optimizer is not None:
            device = torch.device("cpu") if self.placement.offload_optimizer else self.placement.storage_device
            load_moments(self.optimizer, read_moments(folder, self.trainable), device)


class FSDPReference:
    """Another engine's model, to compare with. Its root stays gathered until that engine reshards."""

    def __init__(self, engine: FSDPEngine) -> None:
        self.engine = engine
        self.reference = engine.network.as_reference()

    def frozen_hidden(self, host_batch: Batch, tokens_T: Tensor) -> Tensor:
        return self.engine.call_root(lambda: (self.reference.frozen_hidden(host_batch, tokens_T),))[0]

    def frozen_logits(self, hidden_TH: Tensor) -> Tensor:
        return self.reference.frozen_logits(hidden_TH)


def memory_of(device: torch.device) -> float:
    """Bytes of a GPU; the host's memory is not limited here."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def sharded_parameters(module: nn.Module) -> dict[str, DTensor]:
    found: dict[str, DTensor] = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)  # fully_shard made it one
        found[name] = parameter
    return found


def like(parameter: DTensor, shard: Tensor) -> DTensor:
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


Weights = dict[str, Tensor]


def weights_to_broadcast(module: nn.Module) -> Weights | None:
    """Called on every rank before sharding. None: each rank has read the model itself. Otherwise the module is on the
    meta device afterwards, also on rank 0, which alone returns weights."""
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if not all_reduce_max(int(is_meta)):
        return None
    assert is_meta == (dist.get_rank() > 0), "only rank 0 reads the model"
    found = {} if is_meta else {name: parameter.detach() for name, parameter in module.named_parameters()}
    allocate(module, torch.device("meta"))
    return found


def allocate_shards(root: nn.Module, device: torch.device) -> None:
    """Allocate uninitialised shards. Parameters stay the same objects; buffers keep their values."""
    buffers = dict(root.named_buffers())
    root.to_empty(device=device)
    for name, buffer in buffers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(root.get_submodule(parent), attribute, buffer)


@torch.no_grad()
def broadcast_weights(weights: Weights, module: nn.Module, device: torch.device) -> None:
    """From the weights of rank 0, which frees each after sending it, into the shards of all ranks."""
    is_source = bool(weights)
    for name, own in module.named_parameters():
        full = torch.empty(own.shape, dtype=own.dtype, device=device)
        if is_source:
            full.copy_(weights.pop(name))
        dist.broadcast(full, src=0)
        copy_full(own, full)
    for buffer in module.buffers():  # in some families buffers are saved with the weights
        dist.broadcast(buffer, src=0)
