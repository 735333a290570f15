"""Several ranks, each with a shard, do what one process does: gradients, updates, scores, checkpoints."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TrainBatch, token_indices
from rloom.engines.base import Placement
from rloom.engines.distributed import all_gather_rows, as_whole_group, backend_of, rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.errors import ConfigError
from rloom.models.load import Lora
from rloom.packing import MicroBatching, share_rows
from tests.engine_subjects import ENGINES, check_recorded, network_of, recording
from tests.helpers import (
    CPU,
    FLOAT32,
    SAME,
    Weights,
    apart,
    assert_identical,
    assert_near,
    float32_as,
    train_batch,
)
from tests.ranks import RankProcesses

LORA = Lora(rank=4)
EVERYTHING = frozenset({"model", "optimizer"})
UNEVEN = {1: MicroBatching(tokens=20), 2: MicroBatching(tokens=16), 4: MicroBatching(tokens=22)}
POLICY = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.01, 0.1, "low_var_kl")
FULL_KL = replace(POLICY, kl_estimator="full")
VALUES = ValueObjective(clip_range=0.01, aggregation="token-mean")
LOCAL, SHARDED = ENGINES["local"], ENGINES["sharded"]


@dataclass(frozen=True)
class Case:
    kind: dict[str, Any]  # of engine
    objective: Any = POLICY
    family: str = "qwen2"
    reference: str | None = None  # a family: another model to be compared with


@dataclass(frozen=True)
class Course:
    """What two updates on one rank looked like, or in one process."""

    metrics: list[dict[str, float]]
    norms: list[float]
    gradients: list[Weights]
    start: Weights
    weights: Weights
    scores_T: Tensor
    reference_T: Tensor


def share(batch: TrainBatch, rank: int, ranks: int) -> list[int]:
    return share_rows(batch.length_N.tolist(), ranks, balance=True)[rank]


def train(
    name: str, rank: int, ranks: int, folders: dict[str, Path], case: Case, dtype: torch.dtype, **more: Any
) -> Course:
    with float32_as(dtype):
        return take_two_steps(name, rank, ranks, folders, case, **more)


def take_two_steps(name: str, rank: int, ranks: int, folders: dict[str, Path], case: Case, **more: Any) -> Course:
    subject, batch = ENGINES[name], train_batch()
    torch.manual_seed(0)  # an adapter starts from chance
    reference = subject.build(folders[case.reference], adamw=None) if case.reference else None
    engine = subject.build(folders[case.family], micro=UNEVEN[ranks], reference=reference, **case.kind, **more)
    mine, counts = batch.select(share(batch, rank, ranks)), Counts.of(batch, 16)
    start = {name: weight.clone() for name, weight in engine.weights()}
    metrics, norms, gradients = [], [], []
    before_T = engine.score(mine)
    for step in range(2):
        engine.forward_backward(mine, recording(case.objective), counts)
        gradients.append(subject.gradients(engine))
        update = engine.optim_step(0.01)
        if step == 0:
            check_recorded(update, mine, before_T)
        metrics.append(update.metrics)
        norms.append(update.grad_norm)
    scores_T, reference_T = engine.score(mine), engine.score_reference(mine)
    weights, gradients = dict(engine.weights()), gradients if rank == 0 else []
    return Course(metrics, norms, gradients, start, weights, scores_T, reference_T)


def teach_rank(
    rank: int, ranks: int, folders: dict[str, Path], case: Case, dtype: torch.dtype, more: dict[str, Any]
) -> Course:
    return train("sharded", rank, ranks, folders, case, dtype, **more)


@pytest.fixture(scope="module")
def folders(model_folder: Callable[[str], Path]) -> dict[str, Path]:
    return {family: model_folder(family) for family in ("qwen2", "qwen3", "gemma2")}


CASES = {
    "whole": Case({}),
    "tied": Case({}, family="qwen3"),
    "softcaps": Case({}, family="gemma2"),
    "padded": Case({"packed": False}),
    "checkpointed": Case({"checkpointing": True}),
    "lora": Case({"lora": LORA}),
    "lora, checkpointed": Case({"lora": LORA, "checkpointing": True}),
    "critic": Case({"critic": True}, VALUES),
    "kl over the vocabulary": Case({}, FULL_KL, reference="gemma2"),
    "kl over the vocabulary to itself before lora": Case({"lora": LORA}, FULL_KL),  # no KL yet
}


ON_FOUR = ("whole", "tied", "lora, checkpointed", "kl over the vocabulary")  # the others take half the time on two
LONG = pytest.mark.long  # for what another case has together with something else


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_learn_what_one_process_learns(
    rank_processes: RankProcesses, folders: dict[str, Path], name: str
) -> None:
    check_against_one_process(rank_processes, folders, 4, CASES[name], {})


@pytest.mark.parametrize(
    "name",
    [
        *("softcaps", "padded", "critic", "kl over the vocabulary to itself before lora"),
        *(pytest.param(name, marks=LONG) for name in ("whole", "checkpointed", "lora")),
    ],
)
def test_two_ranks_learn_what_one_process_learns(
    rank_processes: RankProcesses, folders: dict[str, Path], name: str
) -> None:
    check_against_one_process(rank_processes, folders, 2, CASES[name], {})


@pytest.mark.parametrize("shards", [1, 2])
def test_copies_of_the_weights_stay_the_same(
    rank_processes: RankProcesses, folders: dict[str, Path], shards: int
) -> None:
    """Four ranks: two copies of two shards each, and four whole copies."""
    check_against_one_process(rank_processes, folders, 4, CASES["tied"], {"shards": shards})


def check_against_one_process(
    rank_processes: RankProcesses,
    folders: dict[str, Path],
    ranks: int,
    case: Case,
    more: dict[str, Any],
    *around: Callable[..., Any],
) -> None:
    batch = train_batch()
    cuts = [UNEVEN[ranks].cut(batch.select(share(batch, rank, ranks)).length_N.tolist()) for rank in range(ranks)]
    assert len({len(cut) for cut in cuts}) > 1  # some ranks have more passes than others
    expected = train("local", 0, 1, folders, case, torch.float64)
    work, *rest = *around, teach_rank
    found = rank_processes.run(ranks, work, *rest, folders, case, torch.float64, more)
    for step in range(2):
        assert_near(found[0].gradients[step], expected.gradients[step], SAME)
        for rank in found:
            assert rank.norms[step] == found[0].norms[step] == pytest.approx(expected.norms[step], rel=SAME)
        total = {key: sum(rank.metrics[step][key] for rank in found) for key in expected.metrics[step]}
        assert total == pytest.approx(expected.metrics[step], rel=SAME, abs=SAME)
    assert apart(found[0].weights, expected.weights, expected.start) < SAME
    for rank in found[1:]:
        assert_identical(rank.weights, found[0].weights)
    for name in ("scores_T", "reference_T"):
        merged_T = merge([getattr(rank, name) for rank in found], batch)
        torch.testing.assert_close(merged_T, getattr(expected, name), atol=SAME, rtol=SAME)


def test_in_float32_two_ranks_round_as_one_process_does(
    rank_processes: RankProcesses, folders: dict[str, Path]
) -> None:
    """Their first gradient is as near to the one of float64. Later ones depend on the signs of numbers near zero."""
    case = CASES["kl over the vocabulary to itself before lora"]
    exact, alone = (train("local", 0, 1, folders, case, dtype) for dtype in (torch.float64, FLOAT32))
    pair = rank_processes.run(2, teach_rank, folders, case, FLOAT32, {})
    error, found = (apart(one.gradients[0], exact.gradients[0], zeros(exact)) for one in (alone, pair[0]))
    assert 1e-8 < error < 1e-4 and found < 4 * error
    assert pair[0].norms[0] == pair[1].norms[0] == pytest.approx(exact.norms[0], rel=4 * error)


def zeros(course: Course) -> Weights:
    return {name: torch.zeros_like(gradient) for name, gradient in course.gradients[0].items()}


def merge(parts: list[Tensor], batch: TrainBatch) -> Tensor:
    merged_T = torch.zeros(len(batch.tokens_T), dtype=parts[0].dtype)
    for rank, part_T in enumerate(parts):
        merged_T[token_indices(batch.length_N, torch.tensor(share(batch, rank, len(parts))))] = part_T
    return merged_T


def gather_my_rows(rank: int, ranks: int, whole: Tensor, shards: int) -> Tensor:
    mesh = rank_mesh(torch.device("cpu"), shards)
    most = math.ceil(len(whole) / shards)
    return all_gather_rows(whole[rank % shards * most :][:most], len(whole), mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [4, 2, 1])
def test_rows_are_gathered_from_shards_of_unequal_size(
    rank_processes: RankProcesses, shards: int, dtype: torch.dtype
) -> None:
    """Five rows on four ranks: two, two, one and none."""
    whole = torch.arange(10, dtype=dtype).view(5, 2)
    for found in rank_processes.run(4, gather_my_rows, whole, shards):
        assert torch.equal(found, whole)


def sum_in_a_part(rank: int, ranks: int) -> tuple[int, list[int]]:
    def summed(group: Any) -> int:
        number = torch.tensor(10**rank)
        dist.all_reduce(number, group=group)
        return int(number)

    if rank == 2:  # its groups are more than those of the other rank
        dist.new_group([2], use_local_synchronization=True)
    found, groups = 0, []
    if rank in (1, 2):
        with as_whole_group([1, 2]):
            found, groups = dist.get_rank(), [dist.new_group([0, 1])]
    return found, [summed(group) for group in (*groups, dist.group.WORLD, dist.new_group([0, 1, 2, 3]))]


def test_some_ranks_are_the_whole_group_of_what_is_created_among_them(rank_processes: RankProcesses) -> None:
    everywhere = [1111, 1111]
    expected = [(0, everywhere), (0, [110, *everywhere]), (1, [110, *everywhere]), (0, everywhere)]
    assert rank_processes.run(4, sum_in_a_part) == expected


def test_ranks_on_one_gpu_communicate_over_gloo() -> None:
    """NCCL refuses two ranks on one GPU."""
    gpu = torch.device("cuda", 0)
    assert (backend_of(gpu, shared=False), backend_of(gpu, shared=True)) == ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo")
    assert backend_of(torch.device("cpu"), shared=True) == "gloo"


@pytest.mark.parametrize("name", ["whole", "lora", "critic", "kl over the vocabulary"])
def test_one_rank_is_one_process_bit_for_bit(one_rank: None, folders: dict[str, Path], name: str) -> None:
    expected, found = (train(engine, 0, 1, folders, CASES[name], FLOAT32) for engine in ("local", "sharded"))
    assert found.metrics == expected.metrics and found.norms == expected.norms
    assert_identical(found.weights, expected.weights)
    torch.testing.assert_close(found.scores_T, expected.scores_T, atol=0, rtol=0)


BFLOAT16 = Placement(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("name", ["lora", "critic", pytest.param("whole", marks=LONG)])
def test_in_bfloat16_it_gathers_coarse_weights_and_updates_exact_ones(
    rank_processes: RankProcesses, one_rank: None, folders: dict[str, Path], name: str
) -> None:
    case = CASES[name]
    expected, alone = (
        train(engine, 0, 1, folders, case, FLOAT32, placement=BFLOAT16) for engine in ("local", "sharded")
    )
    assert alone.norms == pytest.approx(expected.norms, rel=1e-6)
    assert_near(alone.weights, expected.weights, 1e-6)
    # a rollout engine gets the trainable weights only: of LoRA, the adapter's
    sent = [weight.dtype for key, weight in alone.weights.items() if ("lora_" if name == "lora" else "lm_head") in key]
    assert set(sent) == {torch.float32 if case.objective is VALUES else torch.bfloat16}
    pair = rank_processes.run(2, teach_rank, folders, case, FLOAT32, {"placement": BFLOAT16})
    assert pair[0].norms == pair[1].norms
    # after the first update in bfloat16 the norm depends on how a batch is divided, in one process too: 1.8 to 2.8
    assert pair[0].norms[0] == pytest.approx(expected.norms[0], rel=0.02)


def poisoned_rank(rank: int, ranks: int, folder: Path) -> tuple[list[bool], float, bool]:
    """One advantage, in the share of the last rank, is no number."""
    engine, batch = SHARDED.build(folder, micro=UNEVEN[ranks]), train_batch()
    mine, counts = batch.select(share(batch, rank, ranks)), Counts.of(batch, 16)
    bad = replace(mine, advantages_T=torch.full_like(mine.advantages_T, math.nan)) if rank == ranks - 1 else mine
    before, applied = SHARDED.weights(engine), []
    engine.forward_backward(bad, POLICY, counts)
    update = engine.optim_step(0.01)
    applied.append(update.applied)
    same = all(torch.equal(before[name], weight) for name, weight in SHARDED.weights(engine).items())
    engine.forward_backward(mine, POLICY, counts)
    applied.append(engine.optim_step(0.01).applied)
    return applied, update.grad_norm, same


def test_one_ranks_bad_gradient_is_dropped_on_all(rank_processes: RankProcesses, folders: dict[str, Path]) -> None:
    for applied, norm, same in rank_processes.run(4, poisoned_rank, folders["qwen2"]):
        assert applied == [False, True] and math.isnan(norm) and same


def count_collectives(rank: int, ranks: int, folder: Path) -> tuple[list[int], int, int]:
    """Sums of gradients over ranks in a forward_backward of one pass and of several; numbers that rest here, of all."""
    batch, found = train_batch(), []
    for micro in (MicroBatching(samples=8), MicroBatching(samples=1)):
        engine = SHARDED.build(folder, micro=micro)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.forward_backward(batch.select(share(batch, rank, ranks)), POLICY, Counts.of(batch, 16))
        found.append(sum(event.name.startswith("c10d::_reduce_scatter") for event in profile.events()))
    engine.score(batch)
    return found, sum(p.to_local().numel() for p in engine.module.parameters()), engine.size


def test_gradients_travel_once_however_many_passes_there_are(
    rank_processes: RankProcesses, folders: dict[str, Path]
) -> None:
    ranks = rank_processes.run(2, count_collectives, folders["qwen2"])
    for calls, resting, size in ranks:
        assert calls == [3, 3]  # two layers and the root
        assert resting == pytest.approx(size / 2, rel=0.01)  # nothing stays gathered


def in_little_memory(rank: int, ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Of the last rank; the others do as it does."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == ranks - 1:
            patch.setattr("rloom.engines.fsdp.memory_of", lambda device: 0)
        return work(rank, ranks, *arguments)


def test_without_room_for_a_whole_gradient_every_pass_sums_its_own(
    rank_processes: RankProcesses, folders: dict[str, Path]
) -> None:
    for calls, _, _ in rank_processes.run(2, in_little_memory, count_collectives, folders["qwen2"]):
        assert calls == [3, 4 * 3]  # four samples a rank, one a pass
    for more in ({}, {"shards": 1}, {"shards": 2}):
        check_against_one_process(rank_processes, folders, 4, CASES["tied"], more, in_little_memory)


def test_a_size_that_does_not_divide_the_ranks_is_refused(one_rank: None) -> None:
    with pytest.raises(ConfigError, match=r"fsdp_size=3: 1 ranks do not divide"):
        rank_mesh(torch.device("cpu"), 3)


def read_by_the_first(
    rank: int, ranks: int, folders: dict[str, Path], case: Case, dtype: torch.dtype, more: dict[str, Any]
) -> Course:
    return train("sharded", rank, ranks, folders, case, dtype, empty=rank > 0, **more)


@pytest.mark.parametrize(
    "name", ["tied", "lora", *(pytest.param(name, marks=LONG) for name in ("critic", "kl over the vocabulary"))]
)
def test_ranks_that_did_not_read_the_model_are_given_it(
    rank_processes: RankProcesses, folders: dict[str, Path], name: str
) -> None:
    """Bit for bit as if each had read it; this family ties its embeddings, an adapter is drawn by the first."""
    check_same_course(rank_processes, folders, CASES[name], {})


@pytest.mark.parametrize("more", [{"shards": 1}, {"placement": BFLOAT16}])
def test_copies_and_coarse_weights_are_given_too(
    rank_processes: RankProcesses, folders: dict[str, Path], more: dict[str, Any]
) -> None:
    check_same_course(rank_processes, folders, CASES["lora"], more)


def told_by_the_first(rank: int, ranks: int, folder: Path) -> list[float]:
    """Numbers that a family keeps with its weights and that are no parameters: a scale, in some a router's bias."""
    network = network_of(folder, packed=True, checkpointing=False, lora=None, critic=False, empty=rank > 0)
    network.decoder.layers[0].register_buffer("scale", torch.tensor(0.5 if rank == 0 else 1.0))
    FSDPEngine(network, CPU, rank_mesh(CPU.device), scoring=MicroBatching(samples=8))
    return [float(buffer) for name, buffer in network.module.named_buffers() if name.endswith("scale")]


def test_buffers_are_given_with_the_weights(rank_processes: RankProcesses, folders: dict[str, Path]) -> None:
    assert rank_processes.run(2, told_by_the_first, folders["qwen2"]) == [[0.5], [0.5]]


def check_same_course(
    rank_processes: RankProcesses, folders: dict[str, Path], case: Case, more: dict[str, Any]
) -> None:
    expected, found = (
        rank_processes.run(2, work, folders, case, FLOAT32, more) for work in (teach_rank, read_by_the_first)
    )
    for one, other in zip(found, expected, strict=True):
        assert one.metrics == other.metrics and one.norms == other.norms
        assert_identical(one.weights, other.weights)
        torch.testing.assert_close(one.scores_T, other.scores_T, atol=0, rtol=0)
        torch.testing.assert_close(one.reference_T, other.reference_T, atol=0, rtol=0)
