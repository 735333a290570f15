"""The engine of one process: a whole model on one device.

With bfloat16 the module's parameters are bfloat16, so that training, scoring and generation use the same weights. The
optimizer updates float32 copies of the trainable ones, the masters.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Objective
from rloom.batch import Batch, TrainBatch
from rloom.engines.base import AdamW, Engine, Placement, TensorSpec, Update, dtype_name
from rloom.engines.fingerprint import fingerprint, stacked
from rloom.engines.micro_batches import Tally, accumulate_gradients, score_batches, split_batch
from rloom.engines.optim import clip_and_step, load_moments, make_optimizer, move_moments, read_update
from rloom.engines.storage import (
    ADAPTER,
    MODEL,
    OPTIMIZER,
    CheckpointWriter,
    moment,
    read_moments,
    read_weights,
    whole_file,
)
from rloom.models.network import Network, Reference
from rloom.packing import MicroBatching
from rloom.transfer import tensors_of


class LocalEngine:
    def __init__(
        self,
        network: Network,
        placement: Placement,
        *,
        scoring: MicroBatching,
        training: MicroBatching | None = None,
        optimizer: AdamW | None = None,  # None: it is scored, never trained
        reference: Engine | None = None,  # for a KL over the whole vocabulary; None: itself, adapter off
        compiled: bool = False,
    ) -> None:
        self.network = network
        self.reference: Engine = reference or self
        self.placement, self.device = placement, placement.device
        self.scoring, self.training = scoring, training
        self.module = network.module
        self.accumulated: dict[str, Tensor] = {}  # gradients of masters that are copies
        self.tally = Tally()  # sums over the batches whose gradient is accumulated
        self.adamw = optimizer
        self.writer = CheckpointWriter()
        # with LoRA only the adapter is trained and saved
        self.trainable: dict[str, Tensor] = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if optimizer is None:
            self.module.requires_grad_(False)
        whole = len(self.trainable) == sum(1 for _ in self.module.parameters())
        self.kind = MODEL if whole else ADAPTER
        self.masters = self.cast_and_keep_masters()
        self.module.to(self.placement.storage_device)
        if compiled and placement.device.type == "cuda":
            network.compile()
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self.move_masters(self.placement.storage_device)
            self.optimizer = make_optimizer(self.masters.values(), optimizer)

    def cast_and_keep_masters(self) -> dict[str, Tensor]:
        """float32 weights of the trainable parameters: the parameters themselves, or copies if they are bfloat16."""
        exact = {name: parameter.detach() for name, parameter in self.trainable.items()}
        self.network.cast(self.placement.dtype)
        if self.adamw is None:
            return dict(self.trainable)
        masters: dict[str, Tensor] = {}
        for name, parameter in self.trainable.items():
            if parameter.dtype == torch.float32:
                masters[name] = parameter
                continue
            masters[name] = torch.nn.Parameter(exact[name].float())
            parameter.register_post_accumulate_grad_hook(partial(self.accumulate_gradient, name))
        return masters

    def accumulate_gradient(self, name: str, parameter: Tensor) -> None:
        """Sum the gradients of micro-batches in float32."""
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if name in self.accumulated:
            self.accumulated[name].add_(gradient)
        else:
            self.accumulated[name] = gradient.float()

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def description(self) -> str:
        return f"one process, {self.placement.description}"

    @contextmanager
    def on_device(self) -> Iterator[None]:
        if not self.placement.offload_parameters:
            yield
            return
        self.module.to(self.placement.device)
        try:
            yield
        finally:
            self.module.to(self.placement.storage_device)

    @contextmanager
    def as_reference(self) -> Iterator[Reference]:
        with self.on_device():
            yield self.network.as_reference()

    def score_reference(self, batch: Batch) -> Tensor:
        with self.network.without_adapter():
            return self.score(batch)

    def score(self, batch: Batch) -> Tensor:
        self.module.eval()
        micro_batches = split_batch(batch, self.scoring, self.device, self.network.decoder.prompts(batch))
        with self.on_device():
            return score_batches(micro_batches, self.network.token_outputs)

    def forward_backward(self, batch: TrainBatch, objective: Objective, counts: Counts) -> None:
        assert self.training is not None  # required with an optimizer
        self.network.decoder.train()
        micro_batches = split_batch(batch, self.training, self.device, self.network.decoder.prompts(batch))
        compared: AbstractContextManager[Reference | None] = (
            self.reference.as_reference() if objective.needs_full_kl else nullcontext()
        )
        with self.on_device(), compared as reference:
            loss = partial(self.network.loss, entropy_gradient=objective.needs_entropy_gradient, reference=reference)
            accumulate_gradients(micro_batches, loss, self.tally.begin(objective, counts, micro_batches))

    def optim_step(self, learning_rate: float) -> Update:
        assert self.optimizer is not None and self.adamw is not None
        with self.optimizer_on_device():
            for name, gradient in self.accumulated.items():
                self.masters[name].grad = gradient
            self.accumulated = {}
            norm = clip_and_step(self.optimizer, self.masters.values(), self.adamw, learning_rate)
            self.copy_masters()
        tally, self.tally = self.tally, Tally()
        return read_update(norm, tally)

    @torch.no_grad()
    def copy_masters(self) -> None:
        coarser = [name for name, parameter in self.trainable.items() if self.masters[name] is not parameter]
        if coarser:
            torch._foreach_copy_([self.trainable[name] for name in coarser], [self.masters[name] for name in coarser])

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Parameters, masters and moments are on the device; what is offloaded goes back to the host afterwards."""
        assert self.optimizer is not None
        with self.on_device():
            if self.placement.offload_parameters:
                self.move_masters(self.placement.device)
            if self.placement.offload_optimizer:
                move_moments(self.optimizer, self.placement.device)
            yield
        if self.placement.offload_parameters:
            self.move_masters(self.placement.storage_device)
        if self.placement.offload_optimizer:
            move_moments(self.optimizer, torch.device("cpu"))

    def move_masters(self, device: torch.device) -> None:
        for name, parameter in self.trainable.items():
            if self.masters[name] is not parameter:
                self.masters[name].data = self.masters[name].data.to(device)

    def sent(self, frozen: bool) -> dict[str, Tensor]:
        return tensors_of(self.module) if frozen else self.trainable

    def weights(self, frozen: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.sent(frozen).items():
            yield name, tensor.detach()

    def manifest(self, frozen: bool = False) -> list[TensorSpec]:
        return [TensorSpec(name, [*t.shape], dtype_name(t.dtype)) for name, t in self.sent(frozen).items()]

    def fingerprints(self, frozen: bool = False) -> Tensor:
        return stacked([fingerprint(tensor.detach().to(self.device)) for tensor in self.sent(frozen).values()])

    def save(self, folder: Path, contents: frozenset[str], background: bool = False) -> list[Path]:
        files = [whole_file(folder, self.kind, self.masters)] if "model" in contents else []
        if "optimizer" in contents and self.optimizer is not None:
            files.append(whole_file(folder, OPTIMIZER, self.moments()))
        self.writer.write(folder, files, background=background)
        return [file.file for file in files]

    def check_save(self, wait: bool) -> None:
        self.writer.check(wait=wait)

    def moments(self) -> dict[str, Tensor]:
        assert self.optimizer is not None
        states = {name: self.optimizer.state.get(master, {}) for name, master in self.masters.items()}
        return {moment(name, key): value for name, state in states.items() for key, value in state.items()}

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        if "model" in contents:
            read_weights(folder, self.kind, self.masters)
            self.copy_masters()
        if "optimizer" in contents and self.optimizer is not None:
            device = torch.device("cpu") if self.placement.offload_optimizer else self.placement.device
            load_moments(self.optimizer, read_moments(folder, self.masters), device)
