"""Ranks that share sequences do what one process does that holds them whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TrainBatch, token_indices
from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.load import load_config
from rloom.config.schema import Actor
from rloom.engines.base import Placement
from rloom.engines.ulysses import SequenceParallelGroup, check_heads, exchange, new_sequence_parallel_group
from rloom.errors import ConfigError
from rloom.families.family import family_of
from rloom.launch.models import sequence_ranks
from rloom.models.load import Lora
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching, share_rows
from tests.engine_subjects import ENGINES, check_recorded, recording
from tests.families import listed_families, split_faults, tiny_config
from tests.helpers import (
    FLOAT32,
    SAME,
    SHAPE,
    Weights,
    apart,
    assert_identical,
    assert_near,
    float32_as,
    policy,
    save_model,
    train_batch,
)
from tests.ranks import RankProcesses

NAME = "ulysses_sequence_parallel_size"
KEY = f"actor_rollout_ref.actor.{NAME}"
SMALL = MicroBatching(tokens=16)
POLICY = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.01, 0.1, "low_var_kl")
GSPO = PolicyObjective("gspo", LossSettings(clip_low=3e-4, clip_high=4e-4), "seq-mean-token-mean", 0.0, None, "kl")
VALUES = ValueObjective(clip_range=0.01, aggregation="token-mean")
HEADS = {  # of queries and of keys
    "4 and 1": {"num_key_value_heads": 1},
    "6 and 3": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
}


@dataclass(frozen=True)
class Case:
    family: str = "llama"  # 4 heads of queries, 2 of keys; no bias of keys, whose gradient is rounding alone
    objective: Any = POLICY
    kind: dict[str, Any] | None = None  # of engine
    micro: MicroBatching = SMALL
    rows: tuple[int, ...] = tuple(range(8))


CASES = {
    "grouped keys": Case(),
    "one key": Case("4 and 1"),
    "keys that do not divide": Case("6 and 3"),
    "windows and softcaps": Case("gemma2"),
    "sinks": Case("gpt_oss"),
    "tied": Case("qwen3"),
    "whole sequences judged": Case(objective=GSPO),
    "no entropy bonus": Case(objective=replace(POLICY, entropy_coefficient=0.0)),
    "one pass": Case(micro=MicroBatching(tokens=1000)),
    "lora, checkpointed": Case(kind={"lora": Lora(rank=4), "checkpointing": True}),
    "checkpointed": Case(kind={"checkpointing": True}),
    "critic": Case(objective=VALUES, kind={"critic": True}),
}


@dataclass(frozen=True)
class Course:
    """What an update looked like on one rank, or in one process."""

    metrics: dict[str, float]
    gradients: Weights
    grad_norm: float
    start: Weights
    weights: Weights
    before_T: Tensor
    after_T: Tensor


@pytest.fixture(scope="module")
def folders(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: model_folder(family) for family in ("llama", "qwen3", "gemma2")}
    found["gpt_oss"] = save_model(tmp_path_factory.mktemp("gpt_oss"), tiny_config("gpt_oss"))
    for name, heads in HEADS.items():
        found[name] = save_model(tmp_path_factory.mktemp("heads"), LlamaConfig(**{**SHAPE, **heads}))
    return found


def share(batch: TrainBatch, rank: int, ranks: int, together: int) -> list[int]:
    return share_rows(batch.length_N.tolist(), ranks // together, balance=True)[rank // together]


def train(
    name: str, rank: int, ranks: int, folder: Path, case: Case, together: int, dtype: torch.dtype, **more: Any
) -> Course:
    with float32_as(dtype):
        return take_a_step(name, rank, ranks, folder, case, together, **more)


def take_a_step(name: str, rank: int, ranks: int, folder: Path, case: Case, together: int, **more: Any) -> Course:
    subject, batch = ENGINES[name], train_batch().select(case.rows)
    torch.manual_seed(0)  # an adapter starts from chance
    engine = subject.build(folder, micro=case.micro, **(case.kind or {}), **more)
    mine, counts = batch.select(share(batch, rank, ranks, together)), Counts.of(batch, 16)
    start = {name: weight.clone() for name, weight in engine.weights()}
    before_T = engine.score(mine)
    engine.forward_backward(mine, recording(case.objective), counts)
    gradients = subject.gradients(engine)
    update = engine.optim_step(0.01)
    check_recorded(update, mine, before_T)
    after_T = engine.score(mine)
    return Course(update.metrics, gradients, update.grad_norm, start, dict(engine.weights()), before_T, after_T)


def teach_rank(rank: int, ranks: int, folder: Path, case: Case, together: int, dtype: torch.dtype) -> Course:
    return train("sharded", rank, ranks, folder, case, together, dtype, sequence_ranks=together)


def compare(rank_processes: RankProcesses, folder: Path, ranks: int, together: int, case: Case) -> None:
    batch = train_batch().select(case.rows)
    expected = train("local", 0, 1, folder, case, 1, torch.float64)
    found = rank_processes.run(ranks, teach_rank, folder, case, together, torch.float64)
    firsts = found[::together]
    total = {key: sum(rank.metrics.get(key, 0.0) for rank in firsts) for key in expected.metrics}
    assert total == pytest.approx(expected.metrics, rel=SAME, abs=SAME)
    assert_near(found[0].gradients, expected.gradients, SAME)
    assert apart(found[0].weights, expected.weights, expected.start) < SAME
    for number, rank in enumerate(found):
        assert rank.grad_norm == found[0].grad_norm == pytest.approx(expected.grad_norm, rel=SAME)
        assert_identical(rank.weights, found[0].weights)
        first = found[number - number % together]  # what neighbours say is the same, bit for bit
        assert rank.metrics == first.metrics and torch.equal(rank.before_T, first.before_T)
    for name in ("before_T", "after_T"):
        merged_T = torch.zeros(len(batch.tokens_T), dtype=torch.float64)
        for number, rank in enumerate(firsts):
            rows = share(batch, number * together, ranks, together)
            merged_T[token_indices(batch.length_N, torch.tensor(rows, dtype=torch.long))] = getattr(rank, name)
        torch.testing.assert_close(merged_T, getattr(expected, name), atol=SAME, rtol=SAME)


IN_PAIRS = ("whole sequences judged", "lora, checkpointed")


@pytest.mark.parametrize("name", [name for name in CASES if name not in IN_PAIRS])
def test_two_ranks_that_share_every_sequence_learn_what_one_process_learns(
    rank_processes: RankProcesses, folders: dict[str, Path], name: str
) -> None:
    compare(rank_processes, folders[CASES[name].family], 2, 2, CASES[name])


@pytest.mark.parametrize("name", IN_PAIRS)
def test_two_pairs_learn_what_one_process_learns(
    rank_processes: RankProcesses, folders: dict[str, Path], name: str
) -> None:
    case, batch = CASES[name], train_batch()
    passes = [
        [sum(lengths[row] for row in rows) for rows in case.micro.cut(lengths)]
        for lengths in (batch.select(share(batch, rank, 4, 2)).length_N.tolist() for rank in (0, 2))
    ]
    assert len(passes[0]) != len(passes[1])  # one pair waits for the other
    assert any(tokens % 2 for of_pair in passes for tokens in of_pair)  # some passes are padded
    compare(rank_processes, folders[case.family], 4, 2, case)


def test_a_pair_without_samples_keeps_in_step(rank_processes: RankProcesses, folders: dict[str, Path]) -> None:
    compare(rank_processes, folders["llama"], 4, 2, Case(rows=(3,)))


@pytest.mark.parametrize("name", ["one key", pytest.param("grouped keys", marks=pytest.mark.long)])
def test_four_ranks_share_every_sequence(rank_processes: RankProcesses, folders: dict[str, Path], name: str) -> None:
    """One head each: what a key's copies learn adds up."""
    compare(rank_processes, folders[CASES[name].family], 4, 4, CASES[name])


def test_in_bfloat16_two_ranks_stay_near_one_process(rank_processes: RankProcesses, folders: dict[str, Path]) -> None:
    coarse = Placement(torch.device("cpu"), torch.bfloat16)
    case = Case(kind={"placement": coarse})
    expected = train("local", 0, 1, folders["llama"], case, 1, FLOAT32)
    pair = rank_processes.run(2, teach_rank, folders["llama"], case, 2, FLOAT32)
    assert pair[0].grad_norm == pair[1].grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
    torch.testing.assert_close(pair[0].before_T, expected.before_T, atol=0.1, rtol=0.02)


def exchange_twice(rank: int, ranks: int, folder: Path) -> tuple[list[float], list[float]]:
    neighbours = new_sequence_parallel_group(2)
    sent = torch.tensor([10.0 * rank, 10.0 * rank + 1], requires_grad=True)
    received = exchange(sent, neighbours.group)
    (received * (1 + torch.arange(2) + 2 * rank)).sum().backward()
    assert sent.grad is not None
    return received.tolist(), sent.grad.tolist()


def test_what_is_sent_comes_back_as_gradient(rank_processes: RankProcesses, folders: dict[str, Path]) -> None:
    # rank 0 has [0, 1], rank 1 has [10, 11]; the receivers weigh what they get by [1, 2] and [3, 4]
    assert rank_processes.run(2, exchange_twice, folders["llama"]) == [
        ([0.0, 10.0], [1.0, 3.0]),
        ([1.0, 11.0], [2.0, 4.0]),
    ]


COMMON = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "phimoe")


@pytest.mark.parametrize("names", [COMMON, pytest.param(None, marks=pytest.mark.long)], ids=["common", "all"])
def test_every_packed_family_is_right_on_ranks_that_share_sequences(
    rank_processes: RankProcesses, names: tuple[str, ...] | None
) -> None:
    cells = {family: line.split(" | ")[1] for family, line in listed_families().items()}
    packed = {family: cell for family, cell in cells.items() if cell.startswith("yes")}
    tried = packed if names is None else {family: packed[family] for family in names}
    for found in rank_processes.run(2, split_faults, tried):
        assert found == dict.fromkeys(tried)


def test_a_family_that_is_wrong_on_ranks_that_share_sequences_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def check_split(model: Any, group: SequenceParallelGroup) -> str:
        tried.append(model.config.num_attention_heads)
        return "log-probs differ"

    monkeypatch.setattr("rloom.families.family.check_split", check_split)
    with pytest.raises(ConfigError) as caught:
        family_of(ModelSource(str(folders["llama"]))).check_split(SequenceParallelGroup("", 8, 0), KEY)
    assert str(caught.value) == (
        f"{KEY}=8: ranks that split the tokens of samples do not compute actor_rollout_ref.model.path="
        f"{folders['llama']} (llama) correctly (log-probs differ); use 1"
    )
    assert tried == [8]  # heads: one for each rank


def test_heads_that_do_not_divide_are_refused(folders: dict[str, Path]) -> None:
    network = policy(folders["6 and 3"])
    check_heads(network, 2, 4, KEY)
    with pytest.raises(ConfigError) as caught:
        check_heads(network, 4, 4, KEY)
    assert str(caught.value) == (
        f"{KEY}=4: the 6 attention heads of LlamaForCausalLM do not divide among 4 ranks; use 1 or 2"
    )


FOUR = ("trainer.n_gpus_per_node=4", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")


def faults(*overrides: str) -> list[str]:
    config = load_config(["actor_rollout_ref.model.path=a/model", *FOUR, *overrides])
    try:
        check(config, declared_needs(config))
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_configuration_that_cannot_share_sequences_is_refused() -> None:
    assert faults(f"{KEY}=2") == []
    assert faults(f"{KEY}=3") == [f"{KEY}=3 does not divide 4 workers; use 2 or 4"]
    assert faults(f"{KEY}=2", "trainer.pools.ref=1", "actor_rollout_ref.actor.use_kl_loss=True") == [
        f"{KEY}=2 does not divide 3 workers; use 1 or 3",
        f"{KEY}=2 does not divide 1 workers of trainer.pools.ref; use 1",
    ]
    [padded] = faults(f"{KEY}=2", "actor_rollout_ref.model.use_remove_padding=False")
    assert padded.startswith(f"{KEY}=2 needs packed sequences; set actor_rollout_ref.model.use_remove_padding=True")
    assert faults(f"critic.{NAME}=2", "trainer.pools.critic=1") == [
        f"critic.{NAME}=2 does not divide 1 workers of trainer.pools.critic; use 1"
    ]
    [padded] = faults(f"critic.{NAME}=2", "critic.model.use_remove_padding=False")
    assert padded.startswith(f"critic.{NAME}=2 needs packed sequences; set critic.model.use_remove_padding=True")
    [full] = faults(f"{KEY}=2", "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=full")
    assert full.startswith(f"{KEY}=2: a KL over the whole vocabulary needs whole sequences on each worker; use 1")


def test_the_token_budget_of_a_gpu_counts_its_stretch() -> None:
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    longest = ("data.max_prompt_length=1000", "data.max_response_length=1001")
    assert faults(f"{KEY}=2", f"{budget}=1001", *longest) == []
    assert faults(f"{KEY}=2", f"{budget}=1000", *longest) == [
        f"{budget}=1000: one sample may have data.max_prompt_length + data.max_response_length "
        "(at most data.max_length) = 2001 tokens on ulysses_sequence_parallel_size=2 workers; use 1001 or more"
    ]
    assert Actor(ppo_max_token_len_per_gpu=100).batching(4, 2) == MicroBatching(tokens=200)
    assert Actor(ppo_micro_batch_size=8).batching(4, 2) == MicroBatching(samples=4)
    config = load_config(["actor_rollout_ref.model.path=a/model", *FOUR, f"{KEY}=2"])
    assert [sequence_ranks(config.actor_rollout_ref.actor, ranks) for ranks in (1, 4)] == [1, 2]  # an evaluation: one
    assert faults(f"critic.{NAME}=2", "critic.ppo_max_token_len_per_gpu=1001", *longest) == []
    [fault] = faults(f"critic.{NAME}=2", "critic.ppo_max_token_len_per_gpu=1000", *longest)
    assert fault.startswith("critic.ppo_max_token_len_per_gpu=1000: one sample may have")
