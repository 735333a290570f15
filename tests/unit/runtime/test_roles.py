"""Sharding, merging and mini-batches: what the roles do around their engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Objective, PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import Batch, TrainBatch
from rloom.engines.base import Update
from rloom.errors import TrainingError
from rloom.runs.metrics import ModelWork
from rloom.runtime.group import LocalGroup
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.roles import Learner, MiniBatching, Scorer
from tests.helpers import a_batch


def mini_batching(prompts: int = 2, *, epochs: int = 1, shuffle: bool = True, seed: int = 1) -> MiniBatching:
    return MiniBatching(prompts_per_update=prompts, epochs=epochs, shuffle=shuffle, seed=seed, horizon=16)


def rows(of: MiniBatching, batch: Batch, step: int = 1) -> list[list[int]]:
    return [chosen.tolist() for chosen in of.mini_batches(batch, step)]


def test_in_order_a_mini_batch_holds_all_answers_to_its_prompts() -> None:
    assert rows(mini_batching(shuffle=False), a_batch()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows(mini_batching(1, shuffle=False), a_batch()) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_last_mini_batch_is_what_is_left() -> None:
    assert rows(mini_batching(3, shuffle=False), a_batch()) == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_answers_to_a_prompt_stay_together_wherever_they_stand() -> None:
    scattered = a_batch().select([0, 2, 4, 6, 1, 3, 5, 7])  # groups 0 1 2 3 0 1 2 3
    assert rows(mini_batching(1, shuffle=False), scattered) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_shuffled_epochs_each_hold_every_row_once_with_prompts_whole() -> None:
    found = rows(mini_batching(2, epochs=3), a_batch())
    assert len(found) == 6 == mini_batching(2, epochs=3).updates(a_batch())
    for epoch in range(3):
        of_epoch = found[2 * epoch : 2 * epoch + 2]
        assert sorted(row for mini in of_epoch for row in mini) == list(range(8))
        assert all(row ^ 1 in mini for mini in of_epoch for row in mini)  # 2k and 2k + 1 are siblings


def test_the_shuffle_is_decided_by_seed_step_and_epoch_alone() -> None:
    batch = large_batch()

    def order(seed: int, step: int) -> list[list[int]]:
        torch.manual_seed(step * 31 + seed)  # the global generator plays no part
        return rows(mini_batching(1, epochs=2, seed=seed), batch, step)

    assert order(1, 1) == order(1, 1)
    first, second = order(1, 1)[:20], order(1, 1)[20:]
    assert first != second  # epochs differ
    assert order(1, 2) != order(1, 1) != order(2, 1)


def large_batch() -> Batch:
    twenty = torch.ones(20, dtype=torch.long)
    return Batch(
        tokens_T=twenty,
        mask_T=twenty.bool(),
        rollout_logprobs_T=torch.zeros(20),
        length_N=twenty,
        group_N=torch.arange(20) * 7,
        score_N=torch.zeros(20),
        valid_N=twenty.bool(),
    )


class Echo:
    """A worker whose output for a token is the token itself, and that remembers what it was asked."""

    def __init__(self, updates: list[Update] | None = None) -> None:
        self.lengths: list[list[int]] = []
        self.counts: list[Counts] = []
        self.rates: list[float] = []
        self.updates = updates or []
        self.folders: list[tuple[str, Path]] = []

    def score(self, batch: Batch) -> Tensor:
        self.lengths.append(batch.length_N.tolist())
        return batch.tokens_T.float()

    def score_reference(self, batch: Batch) -> Tensor:
        return -batch.tokens_T.float()

    def forward_backward(self, batch: TrainBatch, objective: Any, counts: Counts) -> None:
        self.lengths.append(batch.length_N.tolist())
        self.counts.append(counts)
        self.metrics = {"critic/vf_loss": float(len(batch))}

    def optim_step(self, learning_rate: float) -> Update:
        self.rates.append(learning_rate)
        update = self.updates.pop(0) if self.updates else Update(grad_norm=2.0, applied=True)
        return replace(update, metrics=self.metrics)

    def save(self, folder: Path, contents: frozenset[str], background: bool) -> list[Path]:
        assert folder.is_dir()
        self.folders.append(("save", folder))
        return [folder / "weights"]

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        self.folders.append(("load", folder))


def learner(
    *workers: Echo,
    of: MiniBatching | None = None,
    schedule: LearningRateSchedule | None = None,
    limit: int = 2,
    workers_per_share: int = 1,
    objective: Objective | None = None,
) -> Learner:
    return Learner(
        "critic",
        LocalGroup(workers, workers_per_share=workers_per_share),
        objective=objective or ValueObjective(0.5, "token-mean"),
        mini_batching=of or mini_batching(2, shuffle=False),
        schedule=schedule or LearningRateSchedule(0.1),
        balance=True,
        max_nonfinite=limit,
    )


def learn(who: Learner, step: int = 1) -> dict[str, float]:
    return who.learn(a_batch(), step, progress=lambda done, total: None)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("balance", [True, False])
def test_merged_scores_stand_where_their_tokens_stand(workers: int, balance: bool) -> None:
    group = LocalGroup([Echo() for _ in range(workers)])
    assert torch.equal(Scorer(group, balance).score(a_batch()), a_batch().tokens_T.float())
    assert torch.equal(Scorer(group, balance, reference=True).score(a_batch()), -a_batch().tokens_T.float())


def test_shares_are_balanced_by_tokens_only_where_asked() -> None:
    # lengths 9 12 6 15 8 17 12 9: longest first to the lighter worker gives 17+12+9+6 = 44 and 15+12+9+8 = 44
    pair = [Echo(), Echo()]
    Scorer(LocalGroup(pair), balance=True).score(a_batch())
    assert [worker.lengths for worker in pair] == [[[6, 17, 12, 9]], [[9, 12, 15, 8]]]
    pair = [Echo(), Echo()]
    Scorer(LocalGroup(pair), balance=False).score(a_batch())
    assert [worker.lengths for worker in pair] == [[[9, 12, 6, 15]], [[8, 17, 12, 9]]]


def test_every_worker_divides_by_the_counts_of_the_whole_mini_batch() -> None:
    pair = [Echo(), Echo()]
    metrics = learn(learner(*pair))
    # rows 0-3 teach 6 + 9 + 4 + 10 tokens (3 of row 3 are a tool's); of rows 4-7 the first failed: 12 + 8 + 5
    assert pair[0].counts == pair[1].counts == [Counts(29, 4, 16), Counts(25, 3, 16)]
    assert metrics["critic/vf_loss"] == 4.0  # the workers' shares, 2 + 2, in each of two updates


@pytest.mark.parametrize("reference", [False, True])
def test_workers_that_share_sequences_get_the_same_share_and_count_once(reference: bool) -> None:
    four = [Echo() for _ in range(4)]
    scores_T = Scorer(LocalGroup(four, workers_per_share=2), reference=reference).score(a_batch())
    assert torch.equal(scores_T, (-1 if reference else 1) * a_batch().tokens_T.float())
    if not reference:
        assert [worker.lengths for worker in four] == [[[6, 17, 12, 9]]] * 2 + [[[9, 12, 15, 8]]] * 2
    four = [Echo() for _ in range(4)]
    pairs = learner(*four, workers_per_share=2)
    assert learn(pairs)["critic/vf_loss"] == 4.0  # the pairs' shares, 2 + 2, in each of two updates
    assert four[0].lengths == four[1].lengths != four[2].lengths == four[3].lengths
    assert four[0].counts == four[3].counts == [Counts(29, 4, 16), Counts(25, 3, 16)]
    assert [len(worker.rates) for worker in four] == [2, 2, 2, 2]  # every worker takes the step
    assert torch.equal(pairs.scorer.score(a_batch()), a_batch().tokens_T.float())


def test_metrics_are_means_over_the_updates_and_the_rate_is_the_steps() -> None:
    worker = Echo([Update(1.0, True), Update(3.0, True)])
    progress: list[tuple[int, int]] = []
    who = learner(worker, schedule=LearningRateSchedule(0.4, warmup_steps=4))
    metrics = who.learn(a_batch(), 3, lambda done, total: progress.append((done, total)))
    assert metrics == {
        "critic/vf_loss": 4.0,
        "critic/grad_norm": 2.0,
        "critic/lr": pytest.approx(0.3),
        "critic/nonfinite_updates": 0.0,
    }
    assert worker.rates == pytest.approx([0.3, 0.3])
    assert progress == [(0, 2), (1, 2), (2, 2)]


def test_a_skipped_update_is_counted_and_its_numbers_left_out() -> None:
    metrics = learn(learner(Echo([Update(float("nan"), False), Update(3.0, True)])))
    assert metrics["critic/grad_norm"] == 3.0
    assert metrics["critic/nonfinite_updates"] == 1.0


def test_so_many_skipped_in_a_row_stop_the_run_even_across_steps() -> None:
    bad, good = Update(float("inf"), False), Update(1.0, True)
    who = learner(Echo([good, bad, bad, good]))
    learn(who, step=1)
    with pytest.raises(TrainingError) as caught:
        learn(who, step=2)
    assert str(caught.value).startswith("2 critic updates in a row had a gradient that is not finite")
    assert "trainer.max_nonfinite_updates=2" in str(caught.value)


def test_skipped_updates_that_are_not_in_a_row_do_not_stop_it() -> None:
    bad, good = Update(float("inf"), False), Update(1.0, True)
    who = learner(Echo([bad, good, bad, good]))
    assert [learn(who, step)["critic/nonfinite_updates"] for step in (1, 2)] == [1.0, 1.0]


def test_a_role_keeps_to_its_own_folder_of_a_checkpoint(tmp_path: Path) -> None:
    worker = Echo()
    who = learner(worker)
    who.save(tmp_path, frozenset({"model"}))
    who.load(tmp_path, frozenset({"model"}))
    assert worker.folders == [("save", tmp_path / "critic"), ("load", tmp_path / "critic")]


# Answers whose advantage is 0. Lengths 9 12 6 15 | 8 17 12 9, of which 6 9 4 10 | 3 12 8 5 tokens are the policy's.
SKIPPING = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.0, None, "low_var_kl", skips_zero_advantages=True)


def with_advantage(*rows: int) -> TrainBatch:
    batch = a_batch()
    kept_T = torch.isin(batch.sample_T, torch.tensor(rows))
    return replace(batch, advantages_T=kept_T * batch.mask_T.float())


def test_answers_without_an_advantage_stay_in_the_denominators_of_the_loss() -> None:
    worker = Echo()
    metrics = learner(worker, objective=SKIPPING).learn(with_advantage(2, 3, 5, 6), 1)
    assert worker.lengths == [[6, 15], [17, 12]]
    first, second = worker.counts
    assert first == Counts(29, 4, 16, measured=Counts(14, 2, 16))
    assert second == Counts(25, 3, 16, measured=Counts(20, 2, 16))
    assert metrics["critic/trained_answers"] == pytest.approx(4 / 7)  # the score of row 4 failed


def test_an_advantage_outside_of_the_loss_trains_nothing() -> None:
    """Row 4, whose score failed; row 3 where correction rejected all of it; row 2 before its answer."""
    worker, batch = Echo(), with_advantage(0, 3, 4, 5)
    advantages_T = batch.advantages_T.where(batch.sample_T != 2, 1) * (batch.mask_T == (batch.sample_T != 2))
    batch = replace(batch, advantages_T=advantages_T, keep_T=batch.sample_T != 3)
    assert learner(worker, objective=SKIPPING).learn(batch, 1)["critic/trained_answers"] == pytest.approx(2 / 6)
    assert worker.lengths == [[9], [17]]


def test_a_mini_batch_without_an_advantage_trains_its_shortest_answer_in_the_loss() -> None:
    pair = [Echo(), Echo()]
    metrics = learner(*pair, objective=SKIPPING).learn(with_advantage(0, 1, 2, 3), 1)
    assert [worker.lengths for worker in pair] == [[[6, 15], [9]], [[9, 12], []]]  # row 7; row 4 is shorter and failed
    assert pair[0].counts[1] == pair[1].counts[1] == Counts(25, 3, 16, measured=Counts(5, 1, 16))
    assert [len(worker.rates) for worker in pair] == [2, 2]
    assert metrics["critic/trained_answers"] == pytest.approx(4 / 7)


def test_with_an_advantage_everywhere_nothing_is_left_out() -> None:
    """Of the failed answer no token is in the loss."""
    worker = Echo()
    assert learner(worker, objective=SKIPPING).learn(with_advantage(*range(8)), 1)["critic/trained_answers"] == 1.0
    assert worker.lengths == [[9, 12, 6, 15], [17, 12, 9]]
    assert worker.counts == [Counts(29, 4, 16), Counts(25, 3, 16, measured=Counts(25, 3, 16))]


def test_the_critic_trains_all_answers() -> None:
    worker = Echo()
    assert "critic/trained_answers" not in learner(worker).learn(with_advantage(2), 1)
    assert worker.counts == [Counts(29, 4, 16), Counts(25, 3, 16)]


def test_the_flops_of_an_update_are_those_of_the_answers_that_it_trains() -> None:
    """One parameter, of which each token counts 6: answers 2 and 5 have 6 + 17 tokens, all eight 88."""
    who, work = learner(Echo(), of=mini_batching(epochs=2), objective=SKIPPING), ModelWork(1, 1, {})
    assert who.update_flops(with_advantage(2, 5), work) == 2 * 6 * 23
    assert learner(Echo()).update_flops(with_advantage(2, 5), work) == 6 * 88
