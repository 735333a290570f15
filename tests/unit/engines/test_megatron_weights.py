"""Hugging Face tensors in a Megatron engine and back: bit for bit, from checkpoints of any split."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rloom.algos.aggregate import Counts
from rloom.engines.local import LocalEngine
from rloom.engines.megatron.sizes import ModelParallel
from rloom.errors import CheckpointError
from tests.engine_subjects import local, local_weights, sharded
from tests.helpers import SAME, Weights, apart, assert_identical, float32_as, train_batch
from tests.megatron_ranks import EVERYTHING, on_ranks, on_ranks_in_float64, read_and_stream, resume, train_and_save
from tests.ranks import RankProcesses
from tests.unit.engines.test_megatron import POLICY

SPLITS = {
    "one rank": (1, ModelParallel()),
    "tensor": (2, ModelParallel(2)),
    "pipeline": (2, ModelParallel(1, 2)),
    "both": (4, ModelParallel(2, 2)),
}


def parameters(folder: Path) -> Weights:
    return local_weights(local(folder))


@pytest.mark.parametrize(
    ("split", "family", "dtype"),
    [
        ("one rank", "qwen3", torch.float32),  # tied, norms of queries and keys
        ("tensor", "qwen2", torch.bfloat16),  # biases
        ("pipeline", "qwen3", torch.bfloat16),
        ("both", "llama", torch.float32),  # untied
        ("both", "qwen3", torch.float32),
    ],
)
def test_weights_return_as_they_were_read(
    rank_processes: RankProcesses,
    model_folder: Callable[[str], Path],
    split: str,
    family: str,
    dtype: torch.dtype,
) -> None:
    ranks, sizes = SPLITS[split]
    folder = model_folder(family)
    expected = {name: weight.to(dtype) for name, weight in parameters(folder).items()}
    for manifest, weights, _ in rank_processes.run(
        ranks, on_ranks, read_and_stream, model_folder(family), sizes, dtype
    ):
        assert_identical(weights, expected)
        assert manifest == [
            (name, list(weight.shape), str(dtype).removeprefix("torch.")) for name, weight in weights.items()
        ]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_return_as_they_were_read(
    rank_processes: RankProcesses,
    model_folder: Callable[[str], Path],
    family: str,
) -> None:
    sizes = ModelParallel(2, expert=2, expert_tensor=2)
    found = rank_processes.run(4, on_ranks, read_and_stream, model_folder(family), sizes, torch.float32)
    for _, weights, _ in found:
        assert_identical(weights, parameters(model_folder(family)))


def test_no_rank_holds_the_whole_model(rank_processes: RankProcesses, model_folder: Callable[[str], Path]) -> None:
    """An untied model on 2 x 2 ranks: each holds half of its stage's matrices, and its norms."""
    found = rank_processes.run(4, on_ranks, read_and_stream, model_folder("llama"), ModelParallel(2, 2), torch.float32)
    assert all(held < 0.27 for _, _, held in found)
    assert sum(held for _, _, held in found) == pytest.approx(1.0, abs=0.01)  # norms are on two ranks


@pytest.fixture(scope="module")
def saved(
    rank_processes: RankProcesses,
    model_folder: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Weights]:
    """A checkpoint after two steps on two tensor-parallel ranks, and its weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = ModelParallel(2)
    found = rank_processes.run(
        2, on_ranks_in_float64, train_and_save, model_folder("qwen3", torch.float64), sizes, POLICY, 2, folder
    )
    return folder, found[0]


@pytest.fixture(scope="module")
def three_steps(model_folder: Callable[..., Path]) -> tuple[Weights, Weights]:
    """(before, after): in one process, without a checkpoint."""
    with float32_as(torch.float64):
        engine = local(model_folder("qwen3", torch.float64))
        before = local_weights(engine)
        take_steps(engine, 3)
    return before, local_weights(engine)


def take_steps(engine: LocalEngine, steps: int) -> None:
    batch = train_batch()
    for _ in range(steps):
        engine.forward_backward(batch, POLICY, Counts.of(batch, 16))
        engine.optim_step(0.01)


@pytest.mark.parametrize("split", ["pipeline", "both", "tensor"])
def test_another_split_goes_on_from_a_checkpoint(
    rank_processes: RankProcesses,
    model_folder: Callable[..., Path],
    saved: tuple[Path, Weights],
    three_steps: tuple[Weights, Weights],
    split: str,
) -> None:
    ranks, sizes = SPLITS[split]
    folder = model_folder("qwen3", torch.float64)
    found = rank_processes.run(ranks, on_ranks_in_float64, resume, folder, sizes, POLICY, 1, saved[0])
    for before, after in found:
        assert_identical(before, saved[1])
        assert apart(after, three_steps[1], three_steps[0]) < SAME


def test_one_process_goes_on_from_a_checkpoint(
    model_folder: Callable[..., Path],
    saved: tuple[Path, Weights],
    three_steps: tuple[Weights, Weights],
) -> None:
    with float32_as(torch.float64):
        engine = local(model_folder("qwen3", torch.float64))
        engine.load(saved[0], EVERYTHING)
        assert_identical(local_weights(engine), saved[1])
        take_steps(engine, 1)
    assert apart(local_weights(engine), three_steps[1], three_steps[0]) < SAME


def test_a_checkpoint_of_one_process_is_read_by_ranks(
    rank_processes: RankProcesses,
    model_folder: Callable[..., Path],
    three_steps: tuple[Weights, Weights],
    tmp_path: Path,
) -> None:
    with float32_as(torch.float64):
        engine = local(model_folder("qwen3", torch.float64))
        take_steps(engine, 2)
        engine.save(tmp_path, EVERYTHING)
    folder, sizes = model_folder("qwen3", torch.float64), ModelParallel(2, 2)
    for before, after in rank_processes.run(4, on_ranks_in_float64, resume, folder, sizes, POLICY, 1, tmp_path):
        assert_identical(before, local_weights(engine))
        assert apart(after, three_steps[1], three_steps[0]) < SAME


def shards(rank: int, ranks: int, folder: Path, saved: Path) -> Weights:
    with float32_as(torch.float64):
        engine = sharded(folder)
        engine.load(saved, EVERYTHING)
        return {name: weight.clone() for name, weight in engine.weights()}


def test_fsdp_reads_a_checkpoint_of_megatron(
    rank_processes: RankProcesses,
    model_folder: Callable[[str], Path],
    saved: tuple[Path, Weights],
) -> None:
    for weights in rank_processes.run(2, shards, model_folder("qwen3"), saved[0]):
        assert_identical(weights, saved[1])


def test_a_checkpoint_of_another_model_is_refused(
    rank_processes: RankProcesses,
    model_folder: Callable[[str], Path],
    saved: tuple[Path, Weights],
) -> None:
    with pytest.raises(AssertionError, match=r"resume with the model it was saved from"):
        rank_processes.run(2, on_ranks, resume, model_folder("llama"), ModelParallel(2), POLICY, 0, saved[0])


def test_a_file_that_one_rank_cannot_write_is_an_error_on_every_rank(
    rank_processes: RankProcesses, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The other ranks gather with that rank: they must not wait for it forever."""
    (tmp_path / "model_shards" / "rank_1.safetensors").mkdir(parents=True)
    for message in rank_processes.run(2, on_ranks, save_error, model_folder("qwen3"), tmp_path):
        assert "cannot be written: rank 1: [Errno 21] Is a directory" in message


def save_error(rank: int, ranks: int, folder: Path, saved: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        train_and_save(rank, ranks, folder, ModelParallel(2), POLICY, 0, saved)
    return str(caught.value)
