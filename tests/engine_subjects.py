"""The engines under test: how to build each, and how to look inside. Another joins by one entry in ENGINES."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TrainBatch
from rloom.engines.base import AdamW, Engine, Placement, Update
from rloom.engines.distributed import rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.engines.local import LocalEngine
from rloom.engines.ulysses import new_sequence_parallel_group
from rloom.models.load import Lora, load_causal_lm
from rloom.models.network import PolicyNetwork, ValueNetwork
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching
from rloom.runtime.group import LocalGroup
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.roles import Learner, MiniBatching
from tests.helpers import ADAMW, FLOAT32, Weights, copied_model, float32_as

WHOLE = MicroBatching(samples=8)
OBJECTIVE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.01, 0.1, "low_var_kl")


@dataclass(frozen=True)
class Subject:
    build: Callable[..., Any]  # keywords as `local` takes them -> an Engine
    gradients: Callable[[Any], Weights]
    weights: Callable[[Any], Weights]  # those that learn


def network_of(
    folder: Path, *, packed: bool, checkpointing: bool, lora: Lora | None, critic: bool, empty: bool = False
) -> PolicyNetwork | ValueNetwork:
    if lora is None and not empty:
        model = copied_model(folder)
    else:
        with float32_as(FLOAT32):  # safetensors finds the dtype of a file by its name in torch
            model = load_causal_lm(ModelSource(str(folder)), lora=lora, empty=empty)
    if lora is None:
        model.set_experts_implementation("eager")  # torch's grouped_mm has no float64
    make = ValueNetwork if critic else PolicyNetwork
    network = make(model, packed=packed, shares_prompts=True)
    network.module.to(torch.float32)
    if checkpointing:
        network.decoder.enable_checkpointing()
    return network


def local(
    folder: Path,
    *,
    packed: bool = True,
    checkpointing: bool = False,
    micro: MicroBatching = WHOLE,
    lora: Lora | None = None,
    adamw: AdamW | None = ADAMW,
    critic: bool = False,
    placement: Placement | None = None,
    reference: LocalEngine | None = None,
) -> LocalEngine:
    network = network_of(folder, packed=packed, checkpointing=checkpointing, lora=lora, critic=critic)
    placement = placement or Placement(torch.device("cpu"), torch.float32)
    return LocalEngine(network, placement, scoring=micro, training=micro, optimizer=adamw, reference=reference)


def local_gradients(engine: LocalEngine) -> Weights:
    own = {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    return {**own, **{name: gradient.clone() for name, gradient in engine.accumulated.items()}}


def local_weights(engine: LocalEngine) -> Weights:
    return {name: p.detach().clone() for name, p in engine.trainable.items()}


def sharded(
    folder: Path,
    *,
    packed: bool = True,
    checkpointing: bool = False,
    micro: MicroBatching = WHOLE,
    lora: Lora | None = None,
    adamw: AdamW | None = ADAMW,
    critic: bool = False,
    placement: Placement | None = None,
    reference: FSDPEngine | None = None,
    shards: int = -1,
    sequence_ranks: int = 1,
    empty: bool = False,
) -> FSDPEngine:
    """On every rank."""
    network = network_of(folder, packed=packed, checkpointing=checkpointing, lora=lora, critic=critic, empty=empty)
    placement = placement or Placement(torch.device("cpu"), torch.float32)
    mesh = rank_mesh(placement.device, shards)
    return FSDPEngine(
        network,
        placement,
        mesh,
        scoring=micro,
        training=micro,
        optimizer=adamw,
        reference=reference,
        sequence_group=None if sequence_ranks == 1 else new_sequence_parallel_group(sequence_ranks),
    )


def sharded_gradients(engine: FSDPEngine) -> Weights:
    return {name: whole(p.grad).clone() for name, p in engine.trainable.items() if p.grad is not None}


def sharded_weights(engine: FSDPEngine) -> Weights:
    return {name: whole(p).clone() for name, p in engine.trainable.items()}


@torch.no_grad()
def whole(tensor: DTensor) -> torch.Tensor:
    return tensor.full_tensor()


ENGINES: Mapping[str, Subject] = {
    "local": Subject(local, local_gradients, local_weights),
    "sharded": Subject(sharded, sharded_gradients, sharded_weights),
}
NEED_RANKS = ("sharded",)


def learner(*engines: Engine, objective: Any = OBJECTIVE, rate: float = 0.01, max_nonfinite: int = 3) -> Learner:
    return Learner(
        "actor",
        LocalGroup(engines),
        objective=objective,
        mini_batching=MiniBatching(prompts_per_update=2, epochs=1, shuffle=True, seed=3, horizon=16),
        schedule=LearningRateSchedule(rate),
        balance=True,
        max_nonfinite=max_nonfinite,
    )


def recording(objective: Any) -> Any:
    """The objective, which also records the outputs of tokens if it is a policy's."""
    return replace(objective, records_tokens=True) if isinstance(objective, PolicyObjective) else objective


def check_recorded(update: Update, batch: TrainBatch, before_T: Tensor) -> None:
    """An update recorded the log-probs that the model gave the batch before it. A critic's is not recorded."""
    if update.outputs is not None:
        torch.testing.assert_close(update.outputs.output_T[batch.mask_T], before_T[batch.mask_T], rtol=1e-3, atol=1e-4)
        assert update.outputs.entropy_T is not None and bool((update.outputs.entropy_T[batch.mask_T] > 0).all())
