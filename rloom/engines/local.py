"""The engine of one process: a whole model on one device.

In bfloat16 the module's own parameters are bfloat16, so that training, scoring and generation read the same numbers;
what the optimizer updates are float32 copies of those that learn, the masters.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Metrics, Objective, Shares
from rloom.batch import Batch, TokenOutputs, TrainBatch, token_places
from rloom.data.packing import MicroBatching
from rloom.engines.base import Update
from rloom.errors import CheckpointError
from rloom.models.network import Network

B = TypeVar("B", bound=Batch)
WEIGHTS, ADAPTER, OPTIMIZER = "model.safetensors", "lora.safetensors", "optimizer.pt"


@dataclass(frozen=True)
class Placement:
    device: torch.device
    dtype: torch.dtype = torch.float32  # of the arithmetic; what the optimizer updates is float32
    offload_parameters: bool = False
    offload_optimizer: bool = False


@dataclass(frozen=True)
class AdamW:
    weight_decay: float
    betas: tuple[float, float]
    grad_clip: float


class LocalEngine:
    def __init__(
        self,
        network: Network,
        placement: Placement,
        *,
        scoring: MicroBatching,
        training: MicroBatching | None = None,
        optimizer: AdamW | None = None,  # None: it is only ever scored
        reference: "LocalEngine | None" = None,  # for a KL over the whole vocabulary; None: itself, adapter off
        compiled: bool = False,
    ) -> None:
        self.network = network
        self.reference = reference or self
        self.placement = placement
        self.scoring, self.training = scoring, training
        self.module = network.module
        self.gathered: dict[str, Tensor] = {}  # gradients of masters that are copies
        self.adamw = optimizer
        # with LoRA only the adapter learns, and only it is saved
        self.learned = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if optimizer is None:
            self.module.requires_grad_(False)
        whole = len(self.learned) == sum(1 for _ in self.module.parameters())
        self.weights_file = WEIGHTS if whole else ADAPTER
        self.masters = self.cast_keeping_masters()
        self.module.to(self.home)
        if compiled and placement.device.type == "cuda":
            network.compile()
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self.move_masters(self.home)
            self.optimizer = torch.optim.AdamW(
                self.masters.values(), lr=0.0, betas=optimizer.betas, weight_decay=optimizer.weight_decay, fused=True
            )

    def cast_keeping_masters(self) -> dict[str, Tensor]:
        """The float32 numbers behind what learns: the parameters themselves, or copies where those are coarser."""
        exact = {name: parameter.detach() for name, parameter in self.learned.items()}
        self.network.cast(self.placement.dtype)
        if self.adamw is None:
            return dict(self.learned)
        masters: dict[str, Tensor] = {}
        for name, parameter in self.learned.items():
            if parameter.dtype == torch.float32:
                masters[name] = parameter
                continue
            masters[name] = torch.nn.Parameter(exact[name].float())
            parameter.register_post_accumulate_grad_hook(partial(self.gather_gradient, name))
        return masters

    def gather_gradient(self, name: str, parameter: Tensor) -> None:
        """Micro-batches add up in float32."""
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if name in self.gathered:
            self.gathered[name].add_(gradient)
        else:
            self.gathered[name] = gradient.float()

    @property
    def size(self) -> int:
        """Parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def device(self) -> torch.device:
        return self.placement.device

    @property
    def home(self) -> torch.device:
        """Where the parameters rest between uses."""
        return torch.device("cpu") if self.placement.offload_parameters else self.placement.device

    @contextmanager
    def on_device(self) -> Iterator[None]:
        if not self.placement.offload_parameters:  # they are there
            yield
            return
        self.module.to(self.placement.device)
        try:
            yield
        finally:
            self.module.to(self.home)

    def score_reference(self, batch: Batch) -> Tensor:
        with self.network.without_adapter():
            return self.score(batch)

    def score(self, batch: Batch) -> Tensor:
        output_T = torch.zeros(len(batch.tokens_T))
        self.module.eval()
        order, passes = self.laid_out(batch, self.scoring)
        with self.on_device(), torch.no_grad():
            found = [self.outputs(here, there).output_T.float() for here, there in passes]
            output_T[token_places(batch.length_N, order)] = torch.cat(found).cpu()
        return output_T

    def laid_out(self, batch: B, batching: MicroBatching) -> tuple[Tensor, Iterator[tuple[B, B]]]:
        """The order in which samples are passed, and the passes, each on the host and on the device.

        The whole batch is sent at once, in that order: a pass is then a stretch of it and keeps nobody waiting.
        """
        lengths = batch.length_N.tolist()
        cuts = batching.cut(lengths)
        order = torch.tensor([row for rows in cuts for row in rows], dtype=torch.long)
        here = batch.select(order)
        there = here.to(self.placement.device)

        def passes() -> Iterator[tuple[B, B]]:
            first_row = first_token = 0
            for rows in cuts:
                last_row = first_row + len(rows)
                last_token = first_token + sum(lengths[row] for row in rows)
                stretch = slice(first_row, last_row), slice(first_token, last_token)
                yield here.stretch(*stretch), there.stretch(*stretch)
                first_row, first_token = last_row, last_token

        return order, passes()

    def outputs(
        self, here: Batch, there: Batch, *, entropy_gradient: bool = False, reference: Network | None = None
    ) -> TokenOutputs:
        return self.network.token_outputs(
            there.tokens_T, here.length_N, here.mask_T, entropy_gradient=entropy_gradient, reference=reference
        )

    def forward_backward(self, batch: TrainBatch, objective: Objective, counts: Counts) -> Metrics:
        assert self.training is not None  # an engine with an optimizer is given one
        total: Shares = {}
        reference = self.reference if objective.needs_full_kl else None
        self.module.train()  # no dropout is left to it; gradient checkpointing asks for it
        _, passes = self.laid_out(batch, self.training)
        with self.on_device(), reference.on_device() if reference is not None else nullcontext():
            for here, there in passes:
                outputs = self.outputs(
                    here,
                    there,
                    entropy_gradient=objective.needs_entropy_gradient,
                    reference=reference.network if reference is not None else None,
                )
                loss, shares = objective(outputs, there, counts)
                loss.backward()
                for name, value in shares.items():
                    total[name] = total[name] + value if name in total else value
            numbers = torch.stack([value.double() for value in total.values()]).tolist() if total else []
        return dict(zip(total, numbers, strict=True))

    def optim_step(self, learning_rate: float) -> Update:
        assert self.optimizer is not None and self.adamw is not None
        with self.optimizer_on_device():
            for name, gradient in self.gathered.items():
                self.masters[name].grad = gradient
            self.gathered = {}
            norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.adamw.grad_clip)
            applied = bool(torch.isfinite(norm))
            if applied:
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate
                self.optimizer.step()
                self.publish_masters()
            self.optimizer.zero_grad(set_to_none=True)
        return Update(float(norm), applied)

    @torch.no_grad()
    def publish_masters(self) -> None:
        coarser = [name for name, parameter in self.learned.items() if self.masters[name] is not parameter]
        if coarser:
            torch._foreach_copy_([self.learned[name] for name in coarser], [self.masters[name] for name in coarser])

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Parameters, masters and moments meet on the device; where told, they go back to the host afterwards."""
        assert self.optimizer is not None
        with self.on_device():
            if self.placement.offload_parameters:
                self.move_masters(self.placement.device)
            if self.placement.offload_optimizer:
                self.move_optimizer(self.placement.device)
            yield
        if self.placement.offload_parameters:
            self.move_masters(self.home)
        if self.placement.offload_optimizer:
            self.move_optimizer(torch.device("cpu"))

    def move_masters(self, device: torch.device) -> None:
        for name, parameter in self.learned.items():
            if self.masters[name] is not parameter:
                self.masters[name].data = self.masters[name].data.to(device)

    def move_optimizer(self, device: torch.device) -> None:
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)

    def save(self, folder: Path, contents: frozenset[str]) -> None:
        try:
            if "model" in contents:
                weights = {name: p.detach().cpu().contiguous() for name, p in self.masters.items()}
                save_file(weights, folder / self.weights_file, metadata={"format": "pt"})
            if "optimizer" in contents and self.optimizer is not None:
                torch.save(self.optimizer.state_dict(), folder / OPTIMIZER)
        except (OSError, SafetensorError, RuntimeError) as error:  # torch says RuntimeError when the disk is full
            raise CheckpointError(f"{folder} cannot be written: {error}; is there room on the disk?") from error

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        if "model" in contents:
            self.load_weights(folder / self.weights_file)
        if "optimizer" in contents and self.optimizer is not None:
            if not (folder / OPTIMIZER).is_file():
                raise CheckpointError(
                    f"{folder / OPTIMIZER} is missing: the checkpoint was saved without it; "
                    "leave optimizer out of actor_rollout_ref.actor.checkpoint.load_contents to go on all the same"
                )
            state = torch.load(folder / OPTIMIZER, map_location=self.placement.device, weights_only=True)
            # its moments, not its settings: those are the configuration's to say
            settings = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": state["state"], "param_groups": settings})
            # torch puts the moments where the masters are, which may be elsewhere
            self.move_optimizer(torch.device("cpu") if self.placement.offload_optimizer else self.placement.device)

    def load_weights(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing: the checkpoint was saved without it (checkpoint.save_contents), or with other "
                "LoRA settings; take a checkpoint that has it, or start anew with trainer.resume_mode=disable"
            )
        saved = load_file(file)
        for name in (*self.masters, *saved):
            there = str(tuple(saved[name].shape)) if name in saved else "missing"
            here = str(tuple(self.masters[name].shape)) if name in self.masters else "missing"
            if there != here:
                raise CheckpointError(
                    f"{file}: {name} is {there} there and {here} in this model; "
                    "resume with the model it was saved from, or start anew with trainer.resume_mode=disable"
                )
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(saved[name])
        self.publish_masters()
