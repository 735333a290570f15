"""Checkpoints of several ranks: read by any number of them, written whole or refused by all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.algos.aggregate import Counts
from rloom.errors import CheckpointError
from rloom.training.checkpoint import Checkpoints, verify_checkpoint
from tests.helpers import SAME, Weights, apart, assert_identical, float32_as, recorded_syncs, train_batch
from tests.ranks import RankProcesses
from tests.unit.engines.test_fsdp import CASES, EVERYTHING, LOCAL, POLICY, SHARDED, VALUES


@pytest.fixture(scope="module")
def folders(model_folder: Callable[[str], Path]) -> dict[str, Path]:
    return {"qwen2": model_folder("qwen2")}


def go_on(
    rank: int, ranks: int, folder: Path, kind: dict[str, Any], load: Path | None, save: Path | None, steps: int
) -> tuple[Weights, Weights]:
    """The weights as loaded, and after some more updates over the whole batch on every rank's share. In float64."""
    with float32_as(torch.float64):
        torch.manual_seed(1 if load else 0)
        engine, batch = SHARDED.build(folder, **kind), train_batch()
        if load:
            engine.load(load, EVERYTHING)
        loaded = SHARDED.weights(engine)
        rows = list(range(rank, len(batch), ranks))
        for _ in range(steps):
            engine.forward_backward(batch.select(rows), VALUES if "critic" in kind else POLICY, Counts.of(batch, 16))
            engine.optim_step(0.01)
        if save:
            engine.save(save, EVERYTHING)
        return loaded, SHARDED.weights(engine)


@pytest.mark.parametrize(("name", "numbers"), [("whole", (1, 2, 3)), ("lora", (3,)), ("critic", (2,))])
def test_a_checkpoint_of_four_ranks_resumes_on_any_number(
    rank_processes: RankProcesses, folders: dict[str, Path], tmp_path: Path, name: str, numbers: tuple[int, ...]
) -> None:
    folder, kind = folders["qwen2"], CASES[name].kind
    _, saved = rank_processes.run(4, go_on, folder, kind, None, tmp_path, 2)[0]
    assert not list(tmp_path.glob("*.safetensors"))
    _, expected = rank_processes.run(4, go_on, folder, kind, tmp_path, None, 1)[0]
    for ranks in numbers:
        loaded, moved = rank_processes.run(ranks, go_on, folder, kind, tmp_path, None, 1)[0]
        assert_identical(loaded, saved)
        assert apart(moved, expected, saved) < SAME  # the moments came along
    with float32_as(torch.float64):
        alone = LOCAL.build(folder, **kind)
    alone.load(tmp_path, EVERYTHING)
    assert_identical(LOCAL.weights(alone), saved)


def test_a_checkpoint_of_one_process_resumes_on_three_ranks(
    rank_processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    with float32_as(torch.float64):
        engine, batch = LOCAL.build(folders["qwen2"]), train_batch()
        for step in range(2):
            engine.forward_backward(batch, POLICY, Counts.of(batch, 16))
            engine.optim_step(0.01)
            if step == 0:
                engine.save(tmp_path, EVERYTHING)
                saved = LOCAL.weights(engine)
    loaded, moved = rank_processes.run(3, go_on, folders["qwen2"], {}, tmp_path, None, 1)[0]
    assert_identical(loaded, saved)
    assert apart(moved, LOCAL.weights(engine), saved) < SAME


def test_a_checkpoint_of_two_copies_holds_one_and_resumes_on_two_ranks(
    rank_processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["qwen2"]
    copies, single = tmp_path / "copies", tmp_path / "single"
    for place in (copies, single):
        place.mkdir()
    _, saved = rank_processes.run(4, go_on, folder, {"shards": 2}, None, copies, 1)[0]
    loaded, _ = rank_processes.run(2, go_on, folder, {}, copies, single, 0)[0]
    assert_identical(loaded, saved)
    assert len({file.name for file in (copies / "model_shards").glob("*.safetensors")}) == 4
    assert all(file.stat().st_size > 10_000 for file in (copies / "model_shards").glob("*.safetensors"))  # shared work
    sizes = [sum(file.stat().st_size for file in place.rglob("*.safetensors")) for place in (copies, single)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_a_checkpoints_shards_are_sealed_with_it(one_rank: None, folders: dict[str, Path], tmp_path: Path) -> None:
    def write(draft: Path) -> None:
        (draft / "actor").mkdir()
        SHARDED.build(folders["qwen2"]).save(draft / "actor", EVERYTHING)

    state = {"step": 1, "kl_coefficient": 0.0, "stream": {}}
    saved = Checkpoints(tmp_path, {"actor": None}).save(1, write, state)
    verify_checkpoint(saved)
    shard = next((saved / "actor" / "model_shards").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"damaged: .*model_shards/rank_0\.safetensors has \d+ bytes"):
        verify_checkpoint(saved)


def saved_and_synced(rank: int, ranks: int, folder: Path, place: Path) -> dict[str, int]:
    engine, batch = SHARDED.build(folder), train_batch()
    engine.forward_backward(batch.select([rank]), POLICY, Counts.of(batch, 16))
    engine.optim_step(0.01)
    with recorded_syncs(place) as synced:
        engine.save(place, EVERYTHING)
    return synced


def test_each_rank_syncs_what_it_wrote(rank_processes: RankProcesses, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whole files, and their entries in the folder, before the driver seals them, which may be on another machine."""
    for rank, synced in enumerate(rank_processes.run(2, saved_and_synced, folders["qwen2"], tmp_path)):
        for shards in ("model_shards", "optimizer_shards"):
            own = tmp_path / shards / f"rank_{rank}.safetensors"
            assert synced.pop(f"{shards}/{own.name}") == own.stat().st_size > 10_000
            index = [size for name, size in synced.items() if name.startswith(f"{shards}/.index.json")]
            assert index == ([(tmp_path / shards / "index.json").stat().st_size] if rank == 0 else [])
            assert synced.pop(shards) == 0
        assert all(".index.json." in name for name in synced)


def save_where_one_rank_sees_nothing(rank: int, ranks: int, folder: Path, place: Path) -> str:
    engine = SHARDED.build(folder)
    with pytest.raises(CheckpointError) as caught:
        engine.save(place if rank == 0 else place / "elsewhere", EVERYTHING)
    return str(caught.value)


def save_where_a_file_is_in_the_way(rank: int, ranks: int, folder: Path, place: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        SHARDED.build(folder).save(place, EVERYTHING)
    return str(caught.value)


def test_a_place_that_cannot_be_written_is_an_error_on_all(
    rank_processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "model_shards").write_text("in the way")
    said = rank_processes.run(2, save_where_a_file_is_in_the_way, folders["qwen2"], tmp_path)
    assert all(f"{tmp_path} cannot be written: rank " in text for text in said)


def test_a_folder_that_not_every_rank_sees_is_refused_by_all(
    rank_processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    said = rank_processes.run(2, save_where_one_rank_sees_nothing, folders["qwen2"], tmp_path)
    assert all("cannot be written: not every rank sees that folder" in text for text in said)
