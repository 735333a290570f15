"""The Megatron engine on a GPU: one rank over NCCL, two ranks on one GPU over gloo, beside one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.engines.base import Placement
from rloom.engines.distributed import join, leave
from rloom.engines.local import LocalEngine
from tests.engine_subjects import network_of
from tests.gpu.test_two_ranks import CUDA, TOKENS, Course, course
from tests.helpers import ADAMW, apart
from tests.ranks import RankProcesses

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
from rloom.engines.megatron.sizes import ModelParallel
from tests.megatron_ranks import copy_of, megatron, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler and megatron-core warn of themselves


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    processes = RankProcesses(2, "cuda:0")
    yield processes
    processes.close()


def on_a_rank(rank: int, ranks: int, folder: Path, sizes: ModelParallel, dtype: torch.dtype, more: Any) -> Course:
    engine = megatron(folder, sizes, micro=TOKENS, adamw=ADAMW, placement=Placement(CUDA, dtype), **more)
    return course(engine, *copy_of(rank, ranks, sizes))


def in_one_process(folder: Path, dtype: torch.dtype) -> tuple[Course, dict[str, torch.Tensor]]:
    network = network_of(folder, packed=True, checkpointing=False, lora=None, critic=False)
    engine = LocalEngine(network, Placement(CUDA, dtype), scoring=TOKENS, training=TOKENS, optimizer=ADAMW)
    start = {name: tensor.float().cpu().clone() for name, tensor in engine.weights()}
    return course(engine, 0, 1), start


def check(found: Course, folder: Path, dtype: torch.dtype) -> None:
    """In float32 one process gives the same numbers. In bfloat16 log-probs are as near to float32's as those of one
    process; after an update rounding has moved tokens of these small models across the edge of the clip range."""
    exact, start = in_one_process(folder, torch.float32)
    if dtype == torch.float32:
        assert found.norms == pytest.approx(exact.norms, rel=1e-3)
        for metrics, expected in zip(found.metrics, exact.metrics, strict=True):
            assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert float((found.scores_T - exact.scores_T).abs().mean()) < 1e-4
        assert apart(found.weights, exact.weights, start) < 0.01
        return
    rounded, _ = in_one_process(folder, dtype)
    assert found.metrics[0] == pytest.approx(rounded.metrics[0], rel=0.1, abs=0.05)
    far, usual = (float((one.scores_T - exact.scores_T).abs().mean()) for one in (found, rounded))
    assert far < 1.5 * usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_over_nccl_learns_what_one_process_learns(
    model_folder: Callable[[str], Path], dtype: torch.dtype
) -> None:
    """Fused head, compiled norms and rotary embedding."""
    join(0, 1, address="127.0.0.1:0", device=CUDA)
    try:
        found = on_ranks(0, 1, on_a_rank, model_folder("qwen3"), ModelParallel(), dtype, {"compiled": True})
    finally:
        leave()
    check(found, model_folder("qwen3"), dtype)


@pytest.mark.parametrize(
    ("family", "sizes", "dtype", "more"),
    [
        ("qwen2", ModelParallel(2), torch.float32, {}),
        ("qwen2", ModelParallel(2), torch.bfloat16, {"compiled": True, "checkpointing": True}),
        ("qwen3", ModelParallel(1, 2), torch.float32, {}),
        ("qwen3", ModelParallel(1, 2), torch.bfloat16, {"compiled": True}),
        ("qwen3_moe", ModelParallel(2, expert=2, expert_tensor=1), torch.float32, {}),
    ],
)
def test_two_ranks_on_one_gpu_learn_what_one_process_learns(
    processes: RankProcesses,
    model_folder: Callable[[str], Path],
    family: str,
    sizes: ModelParallel,
    dtype: torch.dtype,
    more: dict[str, Any],
) -> None:
    for found in processes.run(2, on_ranks, on_a_rank, model_folder(family), sizes, dtype, more):
        check(found, model_folder(family), dtype)


def test_offloaded_buffers_leave_the_gpu(processes: RankProcesses, model_folder: Callable[[str], Path]) -> None:
    held, offloaded = (
        processes.run(2, on_ranks, devices_after_an_update, model_folder("qwen2"), offload)[0]
        for offload in (False, True)
    )
    assert held == {"parameters": "cuda", "masters": "cuda", "moments": "cuda"}
    assert offloaded == {"parameters": "cpu", "masters": "cpu", "moments": "cpu"}


def devices_after_an_update(rank: int, ranks: int, folder: Path, offload: bool) -> dict[str, str]:
    placement = Placement(CUDA, torch.bfloat16, offload_parameters=offload, offload_optimizer=offload)
    engine = megatron(folder, ModelParallel(2), micro=TOKENS, adamw=ADAMW, placement=placement)
    course(engine, 0, 1)
    flat = engine.flats[0]
    assert engine.optimizer is not None and flat.master is not None and flat.gradient is None
    moments = engine.optimizer.optimizer.state[flat.master]["exp_avg"]
    return {"parameters": flat.data.device.type, "masters": flat.master.device.type, "moments": moments.device.type}
