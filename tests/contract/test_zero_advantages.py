"""Answers whose advantage is 0 can be left out of an update, which stays the same. For every engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rloom.algos.objectives import PolicyObjective
from rloom.batch import TokenRecord, TrainBatch
from rloom.engines.base import AdamW, Engine
from rloom.packing import MicroBatching
from tests.engine_subjects import OBJECTIVE, Subject, learner
from tests.helpers import SAME, Weights, apart, assert_identical, assert_same, float32_as, train_batch

ALL = replace(OBJECTIVE, entropy_coefficient=0.0, kl_coefficient=None, records_tokens=True)
DECAYING = AdamW(weight_decay=0.1, betas=(0.9, 0.95), grad_clip=1.0)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float32_as(torch.float64):
        yield


def with_advantage(*rows: int) -> TrainBatch:
    """The advantage of all other samples is 0 at every token."""
    batch = train_batch()
    kept_T = torch.isin(batch.sample_T, torch.tensor(rows))
    return replace(batch, advantages_T=batch.advantages_T.where(kept_T, 0))


def learned(
    subject: Subject, engine: Engine, batch: TrainBatch, objective: PolicyObjective
) -> tuple[Weights, dict[str, float], TokenRecord]:
    record = TokenRecord.empty(batch)
    metrics = learner(engine, objective=objective).learn(batch, 1, record=record)
    return subject.weights(engine), metrics, record


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "clip_cov"])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_weights_after_two_updates_are_those_with_all_answers(
    subject: Subject, folder: Path, loss: str, aggregation: str
) -> None:
    settings = replace(ALL.loss_settings, clip_cov_ratio=0.2, clip_cov_lb=0.05)
    objective = replace(ALL, loss_mode=loss, aggregation=aggregation, loss_settings=settings)
    batch = with_advantage(1, 2, 5)
    engine = subject.build(folder)
    start = subject.weights(engine)
    expected, metrics, _ = learned(subject, engine, batch, objective)
    some = replace(objective, skips_zero_advantages=True)
    found, of_some, _ = learned(subject, subject.build(folder, micro=MicroBatching(tokens=20)), batch, some)
    assert apart(found, expected, start) < SAME
    assert of_some["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-5)
    assert of_some["actor/grad_norm"] == pytest.approx(metrics["actor/grad_norm"], rel=1e-5)
    assert of_some["actor/trained_answers"] == pytest.approx(3 / 7)  # the score of one of the eight failed
    assert "actor/trained_answers" not in metrics


def test_a_worker_may_be_left_without_an_answer(subject: Subject, folder: Path) -> None:
    """Gradients of workers are summands: those of two, one of which has none, are those of one."""
    batch, some = with_advantage(5), replace(ALL, skips_zero_advantages=True)
    alone, pair = subject.build(folder), [subject.build(folder), subject.build(folder)]
    learner(alone, objective=ALL).accumulate(batch)
    assert learner(*pair, objective=some).accumulate(batch) == [[5], []]
    assert_same(subject.gradients(pair[0]), subject.gradients(alone))
    assert all(not bool(gradient.any()) for gradient in subject.gradients(pair[1]).values())


def test_a_mini_batch_without_an_advantage_applies_a_gradient_of_0(subject: Subject, folder: Path) -> None:
    """AdamW's weight decay and the moments of the step before act as with all answers."""
    engines = [subject.build(folder, adamw=DECAYING) for _ in range(2)]
    for engine in engines:
        learned(subject, engine, with_advantage(1, 2, 5, 6), ALL)
    start = subject.weights(engines[0])
    expected, _, _ = learned(subject, engines[0], with_advantage(), ALL)
    found, metrics, _ = learned(subject, engines[1], with_advantage(), replace(ALL, skips_zero_advantages=True))
    assert any(not torch.equal(found[name], start[name]) for name in start)
    assert_identical(found, expected)
    names = ("actor/pg_loss", "actor/grad_norm", "actor/nonfinite_updates", "actor/trained_answers")
    assert [metrics[name] for name in names] == [0, 0, 0, 0]


def test_metrics_are_means_over_the_answers_that_are_trained(subject: Subject, folder: Path) -> None:
    """One update of all prompts, so that the means over its tokens are those of the recorded entropies and ratios."""
    batch = replace(with_advantage(1, 2, 5), group_N=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    assert batch.old_logprobs_T is not None
    _, whole, of_all = learned(subject, subject.build(folder), batch, ALL)
    some = replace(ALL, skips_zero_advantages=True)
    _, metrics, record = learned(subject, subject.build(folder), batch, some)
    used_T = torch.isin(batch.sample_T, torch.tensor([1, 2, 5])) & batch.mask_T  # 9 + 4 + 12 of 54 tokens
    assert int(used_T.sum()) == 25

    def mean(value_T: Tensor) -> Any:
        return pytest.approx(float(value_T[used_T].mean()), rel=1e-5)

    assert metrics["actor/entropy"] == mean(of_all.entropy_T) != pytest.approx(whole["actor/entropy"], rel=1e-5)
    log_ratio_T = of_all.ratio_T.log()
    assert metrics["actor/ppo_kl"] == mean(-log_ratio_T) != pytest.approx(whole["actor/ppo_kl"], rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(whole["actor/pg_clipfrac"] * 54 / 25)
    # what a skipped answer's tokens would have had is unknown: they keep the values of a token without an update
    torch.testing.assert_close(record.entropy_T, of_all.entropy_T.where(used_T, 0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(record.ratio_T[used_T], of_all.ratio_T[used_T], rtol=1e-5, atol=1e-6)
    assert bool((record.ratio_T[~torch.isin(batch.sample_T, torch.tensor([1, 2, 5]))] == 1).all())
