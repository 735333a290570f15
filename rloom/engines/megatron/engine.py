"""The engine of models that one GPU cannot hold: tensor, pipeline, data and expert parallelism by megatron-core.

A replica of the model is `tensor` x `pipeline` ranks, which get the same samples. Every pass, optimizer step, save and
iteration over `weights` is collective. Weights are read from the model's files by each rank: no rank holds all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Objective
from rloom.batch import Batch, TrainBatch
from rloom.engines.base import AdamW, Placement, TensorSpec, Update, dtype_name
from rloom.engines.distributed import all_reduce_max
from rloom.engines.fingerprint import fingerprint, stacked
from rloom.engines.megatron.checkpoints import model_file, moments_file, read_checkpoint, read_moments
from rloom.engines.megatron.flat import FlatParameters, place_parameters
from rloom.engines.megatron.groups import MegatronGroups, make_groups
from rloom.engines.megatron.layout import ParameterLayout
from rloom.engines.megatron.network import StageNetwork
from rloom.engines.megatron.optimizer import DistributedAdamW
from rloom.engines.megatron.pipeline import Pipeline
from rloom.engines.megatron.sizes import ModelParallel, shape_of
from rloom.engines.megatron.weights import StageWeights
from rloom.engines.micro_batches import Tally, dummy_pass, split_batch, zero_loss
from rloom.engines.optim import read_update
from rloom.engines.storage import CheckpointWriter
from rloom.models.network import LossFn, Network, PolicyNetwork, Reference
from rloom.models.source import ModelSource
from rloom.models.weight_files import WeightFiles
from rloom.packing import MicroBatching

HOST = torch.device("cpu")
Passes = list[tuple[Batch, Batch, LossFn]]  # the micro-batches of a batch: on the host, on the device, loss


class MegatronEngine:
    def __init__(
        self,
        described: Network,  # the role's network without weights
        source: ModelSource,
        placement: Placement,
        sizes: ModelParallel,
        *,
        key: str,  # the key of the strategy, for error messages
        scoring: MicroBatching,
        training: MicroBatching | None = None,
        optimizer: AdamW | None = None,  # None: it is scored, never trained
        recompute: bool = False,
        compiled: bool = False,
        overrides: Mapping[str, Any] | None = None,  # fields of megatron-core's TransformerConfig
    ) -> None:
        self.placement, self.device = placement, placement.device
        self.scoring, self.training = scoring, training
        self.writer = CheckpointWriter(shared=True)
        self.groups: MegatronGroups = make_groups(sizes, placement.device)
        is_policy = isinstance(described, PolicyNetwork)
        config = described.decoder.base.config
        self.layout = ParameterLayout(shape_of(config, key=key, has_vocabulary_head=is_policy), sizes, is_policy)
        self.network = StageNetwork(
            described,
            self.layout,
            self.groups,
            device=placement.device,
            dtype=placement.dtype,
            recompute=recompute,
            compiles=compiled and placement.device.type == "cuda",
            overrides=overrides or {},
        )
        self.shapes = {name: tuple(p.shape) for name, p in described.module.named_parameters()}
        self.weights_of = StageWeights(self.layout, self.groups, self.shapes)
        self.parameters = {p.name: p for p in self.layout.parameters(self.weights_of.stage)}
        self.flats = self.make_buffers(trained=optimizer is not None)
        place_parameters(self.network.stage, self.flats)
        self.read(source, config.model_type)
        self.pipeline = Pipeline(self.groups, placement.device, placement.dtype)
        self.tally = Tally()  # sums over the batches whose gradient is accumulated; on the last stage
        self.sums: dict[str, Tensor] = {}  # fingerprints of the weights that were sent last
        self.optimizer: DistributedAdamW | None = None
        if optimizer is not None:
            self.optimizer = DistributedAdamW(
                self.parameters, self.flats, self.groups, optimizer, tied=self.layout.shape.tied
            )
        self.store()

    def make_buffers(self, *, trained: bool) -> list[FlatParameters]:
        """One for each dtype and each group of ranks that have equal parameters."""
        kinds: dict[tuple[torch.dtype, bool], dict[str, tuple[int, ...]]] = {}
        for name, parameter in self.parameters.items():
            # bfloat16 cannot tell a value of 0.500 from 0.501
            dtype = torch.float32 if name == "value_head.weight" else self.placement.dtype
            kinds.setdefault((dtype, parameter.is_expert), {})[name] = parameter.shape
        return [
            FlatParameters(
                shapes,
                dtype,
                self.groups.expert_data if is_expert else self.groups.data,
                self.device,
                trained=trained,
            )
            for (dtype, is_expert), shapes in kinds.items()
        ]

    def read(self, source: ModelSource, family: str) -> None:
        """The weights of the published model. A critic's head starts with 0."""
        experts = self.layout.shape.experts
        files = WeightFiles(source, family, 0 if experts is None else experts.ffn)
        for name, parameter in self.parameters.items():
            if name != "value_head.weight":
                self.flat_of(name).assign(name, self.weights_of.read(parameter, files.read))

    def flat_of(self, name: str) -> FlatParameters:
        return next(flat for flat in self.flats if name in flat.shapes)

    @property
    def size(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def description(self) -> str:
        sizes, copies = self.groups.sizes, self.groups.data.size()
        parts = {"tensor": sizes.tensor, "pipeline": sizes.pipeline, "expert": sizes.expert, "data": copies}
        divided = ", ".join(f"{name} {ranks}" for name, ranks in parts.items() if ranks > 1) or "one rank"
        return f"Megatron ({divided}), {self.placement.description}"

    @contextmanager
    def on_device(self) -> Iterator[None]:
        if not self.placement.offload_parameters:
            yield
            return
        for flat in self.flats:
            flat.move(self.device)
        try:
            yield
        finally:
            for flat in self.flats:
                flat.move(HOST)

    def store(self) -> None:
        """Move what is offloaded to the host."""
        for flat in self.flats:
            if self.placement.offload_parameters:
                flat.move(HOST)
            if self.placement.offload_optimizer:
                flat.move_master(HOST)
        if self.placement.offload_optimizer and self.optimizer is not None:
            self.optimizer.move_moments(HOST)

    def as_reference(self) -> AbstractContextManager[Reference]:
        raise TypeError("config/checks.py refuses a KL over the whole vocabulary with the Megatron engine")

    def score_reference(self, batch: Batch) -> Tensor:
        raise TypeError("config/checks.py refuses LoRA with the Megatron engine")

    def dummies(self, count: int) -> int:
        """Passes to add to `count`. The experts of a layer are on several replicas: all run as many passes."""
        return all_reduce_max(count) - count if self.groups.sizes.expert > 1 else 0

    def pass_sizes(self, batches: Sequence[Batch]) -> list[int]:
        """Tokens of each pass, with padding."""
        multiple = self.network.slicing_ranks
        sizes = [-(-len(batch.tokens_T) // multiple) * multiple for batch in batches]
        if self.groups.sizes.expert == 1 or self.device.type == "cuda":
            return sizes
        # without a GPU, megatron-core exchanges the tokens of experts by all-gather, which requires equal sizes
        largest = torch.tensor(sizes)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [int(size) for size in largest]

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        self.network.stage.eval()
        micro_batches = split_batch(batch, self.scoring, self.device)
        passes = list(micro_batches)
        passes += [dummy_pass(self.device)] * self.dummies(len(passes))
        sizes = self.pass_sizes([host for host, _ in passes])
        outputs_T = [torch.zeros(len(host.tokens_T), device=self.device) for host, _ in passes]

        def forward(number: int, received: Tensor | None) -> Tensor:
            stage = self.network.hidden(*passes[number], sizes[number], received)
            if self.groups.is_last:
                outputs_T[number] = self.network.outputs(stage, *passes[number]).output_T.float()
            return stage.hidden_S1H

        with self.on_device():
            self.pipeline.forward([self.network.passed_shape(size) for size in sizes], forward)
        return self.in_order(outputs_T[: len(micro_batches)], micro_batches.index_T)

    def in_order(self, outputs_T: list[Tensor], index_T: Tensor) -> Tensor:
        """The outputs of the last stage on every stage, in the order of the batch, on the host."""
        output_T = torch.zeros(len(index_T))
        if outputs_T:
            joined = torch.cat(outputs_T)
            if self.groups.sizes.pipeline > 1:
                dist.broadcast(joined, group=self.groups.pipeline, group_src=self.groups.sizes.pipeline - 1)
            output_T[index_T] = joined.cpu()
        return output_T

    def forward_backward(self, batch: TrainBatch, objective: Objective, counts: Counts) -> None:
        assert self.training is not None  # required with an optimizer
        self.network.stage.train()
        micro_batches = split_batch(batch, self.training, self.device)
        objective_loss = self.tally.begin(objective, counts, micro_batches)
        first_tokens = accumulate(micro_batches.tokens, initial=0)
        passes: Passes = [
            (host, device, objective_loss.of_pass(device, first))
            for first, (host, device) in zip(first_tokens, micro_batches, strict=False)
        ]
        passes += [(*dummy_pass(self.device), zero_loss)] * self.dummies(len(passes))
        sizes, gradient = self.pass_sizes([host for host, _, _ in passes]), objective.needs_entropy_gradient

        def forward(number: int, received: Tensor | None) -> Tensor:
            host, device, loss_fn = passes[number]
            stage = self.network.hidden(host, device, sizes[number], received)
            if not self.groups.is_last:
                return stage.hidden_S1H
            return self.network.loss(stage, host, device, loss_fn, entropy_gradient=gradient)

        with self.on_device():
            for flat in self.flats:
                flat.begin_gradient()
            self.pipeline.forward_backward([self.network.passed_shape(size) for size in sizes], forward)

    def optim_step(self, learning_rate: float) -> Update:
        assert self.optimizer is not None
        with self.on_device():
            if self.placement.offload_optimizer:
                for flat in self.flats:
                    flat.move_master(self.device)
                self.optimizer.move_moments(self.device)
            norm = self.optimizer.step(learning_rate)
        self.store()
        tally, self.tally = self.tally, Tally()
        return self.from_last_stage(read_update(norm, tally))

    def from_last_stage(self, update: Update) -> Update:
        """The metrics of the objective are computed on the last stage; the first one's result counts."""
        if self.groups.sizes.pipeline == 1:
            return update
        found: list[Any] = [update]
        dist.broadcast_object_list(
            found, group=self.groups.pipeline, group_src=self.groups.sizes.pipeline - 1, device=self.device
        )
        last: Update = found[0]
        return last

    @torch.no_grad()
    def weights(self, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Nothing is frozen, and the families have no buffer that is saved."""
        self.sums = {}
        with self.on_device():
            for name, tensor in self.weights_of.stream(self.values()):
                self.sums[name] = fingerprint(tensor)
                yield name, tensor

    def fingerprints(self, frozen: bool = False) -> Tensor:
        """Those of what `weights` yielded last: ranks hold parts of rows, and another pass would gather all again."""
        missing_2 = torch.zeros(2, dtype=torch.int64, device=self.device)
        return stacked([self.sums.get(spec.name, missing_2) for spec in self.manifest()])

    def values(self) -> dict[str, Tensor]:
        return {name: view for flat in self.flats for name, view in flat.views(flat.data)}

    def manifest(self, frozen: bool = False) -> list[TensorSpec]:
        names = [name for stage in range(self.groups.sizes.pipeline) for name in self.weights_of.names(stage)]
        dtype = dtype_name(self.placement.dtype)
        return [TensorSpec(name, list(self.shapes[name]), dtype) for name in names]

    def save(self, folder: Path, contents: frozenset[str], background: bool = False) -> list[Path]:
        saved = [model_file(folder, self.weights_of, self.flats)] if "model" in contents else []
        if "optimizer" in contents and self.optimizer is not None:
            saved.append(moments_file(folder, self.weights_of, self.optimizer))
        self.writer.write(folder, [own for own, _ in saved], background=background)
        return [file for _, files in saved for file in files]

    def check_save(self, wait: bool) -> None:
        self.writer.check(wait=wait)

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        with self.on_device():
            if "model" in contents:
                read_part = read_checkpoint(folder, self.shapes)
                for name, parameter in self.parameters.items():
                    self.flat_of(name).assign(name, self.weights_of.read(parameter, read_part))
            if "optimizer" in contents and self.optimizer is not None:
                read_moments(folder, self.weights_of, self.parameters, self.optimizer)
        self.store()
