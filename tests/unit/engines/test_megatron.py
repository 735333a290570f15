"""Ranks that divide a model with megatron-core do what one process does: gradients, updates, scores, checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import token_indices
from rloom.engines.megatron.sizes import ModelParallel
from rloom.packing import MicroBatching
from tests.engine_subjects import local, local_gradients, local_weights
from tests.helpers import CPU, SAME, apart, assert_identical, assert_near, float32_as, train_batch
from tests.megatron_ranks import STEPS, Course, copy_of, on_ranks, on_ranks_in_float64, own_rows, train
from tests.ranks import RankProcesses

ROUTED = 1e-4  # megatron-core computes the routers' probabilities in float32, whatever the model's dtype
MICRO = MicroBatching(tokens=20)
POLICY = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.01, 0.1, "low_var_kl")
VALUES = ValueObjective(clip_range=0.01, aggregation="token-mean")


def in_one_process(folder: Path, objective: Any, **settings: Any) -> tuple[Course, dict[str, torch.Tensor]]:
    engine, batch = local(folder, micro=MICRO, **settings), train_batch()
    start, metrics, norms, gradients = local_weights(engine), [], [], []
    for _ in range(STEPS):
        engine.forward_backward(batch, objective, Counts.of(batch, 16))
        gradients.append(local_gradients(engine))
        update = engine.optim_step(0.01)
        metrics.append(update.metrics)
        norms.append(update.grad_norm)
    return Course(metrics, norms, gradients, local_weights(engine), engine.score(batch)), start


def check(
    processes: RankProcesses,
    folder: Path,
    ranks: int,
    sizes: ModelParallel,
    objective: Any = POLICY,
    settings: dict[str, Any] | None = None,
) -> None:
    settings = {"micro": MICRO, **(settings or {})}
    with float32_as(torch.float64):
        expected, start = in_one_process(folder, objective, critic=settings.get("critic", False))
    found = processes.run(ranks, on_ranks_in_float64, train, folder, sizes, objective, settings)
    batch, same = train_batch(), SAME if sizes.expert == 1 else ROUTED
    firsts = {copy_of(rank, ranks, sizes)[0]: rank for rank in reversed(range(ranks))}  # first rank of each replica
    for step in range(STEPS):
        assert_near(found[0].gradients[step], expected.gradients[step], same)
        for rank in found:
            assert rank.norms[step] == pytest.approx(expected.norms[step], rel=same)
        parts = [found[rank].metrics[step] for rank in firsts.values()]
        total = {key: sum(part[key] for part in parts) for key in expected.metrics[step]}
        assert total == pytest.approx(expected.metrics[step], rel=same, abs=same)
    assert apart(found[0].weights, expected.weights, start) < same
    for rank in found[1:]:
        assert_identical(rank.weights, found[0].weights)
    scores_T = torch.zeros(len(batch.tokens_T), dtype=torch.float64)
    for rank in firsts.values():
        rows = torch.tensor(own_rows(batch, rank, ranks, sizes))
        scores_T[token_indices(batch.length_N, rows)] = found[rank].scores_T
    torch.testing.assert_close(scores_T, expected.scores_T, atol=same, rtol=same)


@dataclass(frozen=True)
class Case:
    ranks: int
    sizes: ModelParallel
    family: str
    objective: Any = POLICY
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "tensor": Case(2, ModelParallel(2), "qwen2"),  # biases of queries, keys and values; an untied head
    "tensor, whole sequences": Case(2, ModelParallel(2, sequence=False), "qwen3"),  # norms of queries and keys; tied
    "more ranks than key-value heads": Case(4, ModelParallel(4), "qwen3"),
    "pipeline": Case(2, ModelParallel(1, 2), "mistral"),  # sliding windows
    "tensor and pipeline": Case(4, ModelParallel(2, 2), "qwen3"),
    "data": Case(2, ModelParallel(), "llama"),
    "tensor and data": Case(4, ModelParallel(2), "llama"),
    "pipeline and data": Case(4, ModelParallel(1, 2), "qwen3"),
    "critic": Case(4, ModelParallel(2, 2), "qwen2", VALUES, {"critic": True}),
    "recomputed": Case(4, ModelParallel(2, 2), "qwen2", settings={"checkpointing": True}),
    "offloaded": Case(
        2,
        ModelParallel(1, 2),
        "qwen3",
        settings={"placement": replace(CPU, dtype=torch.float64, offload_parameters=True, offload_optimizer=True)},
    ),
    "experts": Case(2, ModelParallel(expert=2), "qwen3_moe"),
    "experts, tensor": Case(2, ModelParallel(2, expert=2, expert_tensor=1), "mixtral"),
    "experts' tensors": Case(4, ModelParallel(2, expert=2, expert_tensor=2), "mixtral"),
    "experts, pipeline": Case(4, ModelParallel(1, 2, expert=2), "qwen3_moe"),
}


LONG = {
    "tensor and data",
    "pipeline and data",
    "tensor and pipeline",
    "experts, tensor",
    "experts, pipeline",
}  # the others have each kind of split


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
def test_divided_models_learn_what_one_process_learns(
    rank_processes: RankProcesses, model_folder: Callable[..., Path], name: str
) -> None:
    case = CASES[name]
    folder = model_folder(case.family, torch.float64)
    check(rank_processes, folder, case.ranks, case.sizes, case.objective, case.settings)


@pytest.mark.parametrize("sizes", [ModelParallel(2), ModelParallel(1, 2)], ids=["tensor", "pipeline"])
def test_gradients_in_bfloat16_point_where_those_in_float32_point(
    rank_processes: RankProcesses, model_folder: Callable[[str], Path], sizes: ModelParallel
) -> None:
    """Measured: cosine 0.998 with two tensor-parallel ranks; 0.994 in one process in bfloat16."""
    folder, bfloat16 = model_folder("qwen2"), {"micro": MICRO, "placement": replace(CPU, dtype=torch.bfloat16)}
    expected, _ = in_one_process(folder, POLICY)
    found = rank_processes.run(2, on_ranks, train, folder, sizes, POLICY, bfloat16)[0]
    first, second = (
        torch.cat([course.gradients[0][name].flatten() for name in expected.weights]) for course in (found, expected)
    )
    assert float(torch.nn.functional.cosine_similarity(first, second, 0)) > 0.99
    assert found.weights["model.norm.weight"].dtype == torch.bfloat16
