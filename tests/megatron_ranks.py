"""Megatron engines on the ranks of tests/ranks.py: what each rank runs, and how to look inside.

megatron-core takes seconds to import. Functions import it, since the processes that collect the tests need none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.batch import TrainBatch
from rloom.engines.base import AdamW, Placement
from rloom.engines.fingerprint import fingerprint, stacked
from rloom.engines.megatron.sizes import ModelParallel
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching, share_rows
from tests.engine_subjects import WHOLE, check_recorded, network_of, recording
from tests.helpers import ADAMW, Weights, float32_as, train_batch

if TYPE_CHECKING:
    from rloom.engines.megatron.engine import MegatronEngine

STEPS = 3


@dataclass(frozen=True)
class Course:
    """Three updates on one rank, or in one process."""

    metrics: list[dict[str, float]]
    norms: list[float]
    gradients: list[Weights]
    weights: Weights
    scores_T: Tensor


def megatron(
    folder: Path,
    sizes: ModelParallel,
    *,
    micro: MicroBatching = WHOLE,
    adamw: AdamW | None = ADAMW,
    critic: bool = False,
    placement: Placement | None = None,
    checkpointing: bool = False,
    compiled: bool = False,
    overrides: dict[str, Any] | None = None,
) -> MegatronEngine:
    from rloom.engines.megatron.engine import MegatronEngine

    network = network_of(folder, packed=True, checkpointing=False, lora=None, critic=critic, empty=True)
    return MegatronEngine(
        network,
        ModelSource(str(folder)),
        placement or Placement(torch.device("cpu"), torch.float32),
        sizes,
        key="actor_rollout_ref.actor.strategy",
        scoring=micro,
        training=micro,
        optimizer=adamw,
        recompute=checkpointing,
        compiled=compiled,
        overrides=overrides,
    )


def on_ranks(rank: int, ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """The process groups of one test are not those of the next."""
    from rloom.engines.megatron.core import parallel_state

    try:
        return work(rank, ranks, *arguments)
    finally:
        parallel_state.destroy_model_parallel()


def on_ranks_in_float64(rank: int, ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """The folder of the model has to be in float64, too."""
    with float32_as(torch.float64):
        return on_ranks(rank, ranks, work, *arguments)


def copy_of(rank: int, ranks: int, sizes: ModelParallel) -> tuple[int, int]:
    """(the replica of a rank, replicas)"""
    copies = ranks // sizes.replica
    return rank // sizes.tensor % copies, copies


def own_rows(batch: TrainBatch, rank: int, ranks: int, sizes: ModelParallel) -> list[int]:
    copy, copies = copy_of(rank, ranks, sizes)
    return share_rows(batch.length_N.tolist(), copies, balance=True)[copy]


def train(
    rank: int, ranks: int, folder: Path, sizes: ModelParallel, objective: Any, settings: dict[str, Any]
) -> Course:
    engine, batch = megatron(folder, sizes, **settings), train_batch()
    mine, counts = batch.select(own_rows(batch, rank, ranks, sizes)), Counts.of(batch, 16)
    metrics, norms, gradients = [], [], []
    before_T = engine.score(mine)
    for step in range(STEPS):
        engine.forward_backward(mine, recording(objective), counts)
        gradients.append(whole_gradients(engine))
        update = engine.optim_step(0.01)
        if step == 0:
            check_recorded(update, mine, before_T)
        metrics.append(update.metrics)
        norms.append(update.grad_norm)
    weights = {name: weight.clone() for name, weight in engine.weights()}
    return Course(metrics, norms, gradients if rank == 0 else [], weights, engine.score(mine))


@torch.no_grad()
def whole_gradients(engine: MegatronEngine) -> Weights:
    """Summed over ranks as an update sums them, which changes nothing here."""
    assert engine.optimizer is not None
    values = {}
    for flat in engine.flats:
        assert flat.gradient is not None
        before = flat.gradient.clone()
        engine.optimizer.sum_partial(flat)
        total = flat.gradient.clone()
        flat.gradient.copy_(before)
        dist.all_reduce(total, group=flat.group)
        values |= dict(flat.views(total))
    return {name: tensor.clone() for name, tensor in engine.weights_of.stream(values)}


EVERYTHING = frozenset({"model", "optimizer"})


def train_and_save(
    rank: int, ranks: int, folder: Path, sizes: ModelParallel, objective: Any, steps: int, saved: Path
) -> Weights:
    engine = megatron(folder, sizes)
    take_steps(engine, rank, ranks, sizes, objective, steps)
    engine.save(saved, EVERYTHING)
    return {name: weight.clone() for name, weight in engine.weights()}


def resume(
    rank: int, ranks: int, folder: Path, sizes: ModelParallel, objective: Any, steps: int, saved: Path
) -> tuple[Weights, Weights]:
    """(the weights after reading the checkpoint, those after `steps` more)"""
    engine = megatron(folder, sizes)
    engine.load(saved, EVERYTHING)
    before = {name: weight.clone() for name, weight in engine.weights()}
    take_steps(engine, rank, ranks, sizes, objective, steps)
    return before, {name: weight.clone() for name, weight in engine.weights()}


def take_steps(engine: MegatronEngine, rank: int, ranks: int, sizes: ModelParallel, objective: Any, steps: int) -> None:
    batch = train_batch()
    mine = batch.select(own_rows(batch, rank, ranks, sizes))
    for _ in range(steps):
        engine.forward_backward(mine, objective, Counts.of(batch, 16))
        engine.optim_step(0.01)


def read_and_stream(
    rank: int, ranks: int, folder: Path, sizes: ModelParallel, dtype: torch.dtype
) -> tuple[list[tuple[str, list[int], str]], Weights, float]:
    """(manifest, weights, share of the model's numbers that this rank holds)"""
    engine = megatron(folder, sizes, adamw=None, placement=Placement(torch.device("cpu"), dtype))
    held = sum(flat.data.numel() for flat in engine.flats) / engine.size
    weights = {name: weight.clone() for name, weight in engine.weights()}
    assert torch.equal(engine.fingerprints(), stacked([fingerprint(weight) for weight in weights.values()]))
    return [tuple(spec) for spec in engine.manifest()], weights, held
