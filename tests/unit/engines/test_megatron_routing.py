"""Experts of the rollout, replayed in a divided model: the same log-probs and gradients as in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import ROUTING_MISMATCH
from rloom.batch import TrainBatch
from rloom.engines.local import LocalEngine
from rloom.engines.megatron.sizes import ModelParallel
from rloom.models.routing import NO_CHOICE
from tests.engine_subjects import local_gradients
from tests.helpers import ADAMW, CPU, assert_near, policy, train_batch
from tests.megatron_ranks import megatron, on_ranks, own_rows, whole_gradients
from tests.ranks import RankProcesses
from tests.unit.engines.test_megatron import MICRO, POLICY

EXPERTS, LAYERS, PER_TOKEN = 4, 2, 2


def forced_batch() -> TrainBatch:
    """Choices that routers would rarely make, and none for every fifth token."""
    batch, draw = train_batch(), torch.Generator().manual_seed(3)
    experts_TMK = torch.rand(len(batch.tokens_T), LAYERS, EXPERTS, generator=draw).argsort(-1)[:, :, :PER_TOKEN]
    experts_TMK[::5] = NO_CHOICE
    return replace(batch, experts_TMK=experts_TMK.to(torch.int16))


def replayed(rank: int, ranks: int, folder: Path, sizes: ModelParallel, settings: dict[str, Any]) -> Any:
    engine, batch = megatron(folder, sizes, micro=MICRO, **settings), forced_batch()
    mine = batch.select(own_rows(batch, rank, ranks, sizes))
    scores_T = engine.score(mine)
    engine.forward_backward(mine, POLICY, Counts.of(batch, 16))
    gradients = whole_gradients(engine)
    return scores_T, gradients, engine.optim_step(0.01).metrics


@pytest.mark.parametrize(
    ("family", "ranks", "sizes", "settings"),
    [
        ("qwen3_moe", 2, ModelParallel(2, expert=2, expert_tensor=1), {}),  # each rank has a slice of the tokens
        ("mixtral", 2, ModelParallel(1, 2), {"checkpointing": True}),  # recomputed while another micro-batch runs
    ],
)
def test_experts_of_the_rollout_are_replayed(
    rank_processes: RankProcesses,
    model_folder: Callable[[str], Path],
    family: str,
    ranks: int,
    sizes: ModelParallel,
    settings: dict[str, Any],
) -> None:
    network = policy(model_folder(family), replays_routing=True)
    engine = LocalEngine(network, CPU, scoring=MICRO, training=MICRO, optimizer=ADAMW)
    batch = forced_batch()
    expected_T, chosen_T = engine.score(batch), engine.score(batch.without_experts())
    assert float((expected_T - chosen_T).abs().max()) > 0.1  # the choices matter
    engine.forward_backward(batch, POLICY, Counts.of(batch, 16))
    gradients = local_gradients(engine)
    metrics = engine.optim_step(0.01).metrics
    found = rank_processes.run(ranks, on_ranks, replayed, model_folder(family), sizes, settings)
    for scores_T, _, _ in found:
        torch.testing.assert_close(scores_T, expected_T, atol=2e-5, rtol=1e-5)
    assert_near(found[0][1], gradients, 1e-5)
    if sizes.pipeline == 1:  # otherwise it is that of the last stage's routers
        assert metrics[ROUTING_MISMATCH] > 0.1
        assert found[0][2][ROUTING_MISMATCH] == pytest.approx(metrics[ROUTING_MISMATCH], rel=1e-5)
