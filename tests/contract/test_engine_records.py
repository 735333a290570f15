"""An update returns the log-prob and entropy of each token, if its objective records them. For every engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TokenRecord
from rloom.engines.base import Engine
from rloom.packing import MicroBatching
from rloom.runtime.group import LocalGroup
from rloom.trainer.learning_rate import LearningRateSchedule
from rloom.trainer.roles import Learner, MiniBatching
from tests.engine_subjects import ENGINES, NEED_RANKS, Subject
from tests.helpers import train_batch

OBJECTIVE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.01, 0.1, "low_var_kl")
SPLITS = {
    "eight": {"micro": MicroBatching(samples=1)},
    "by tokens": {"micro": MicroBatching(tokens=20)},
    "padded": {"packed": False},
    "checkpointed": {"checkpointing": True},
}


@pytest.fixture(params=ENGINES)
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param in NEED_RANKS:
        request.getfixturevalue("one_rank")
    return ENGINES[request.param]


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")


def learner(*engines: Engine, objective: PolicyObjective) -> Learner:
    return Learner(
        "actor",
        LocalGroup(engines),
        objective=objective,
        mini_batching=MiniBatching(prompts_per_update=2, epochs=1, shuffle=True, seed=3, horizon=16),
        schedule=LearningRateSchedule(0.0),
        balance=True,
        max_nonfinite=3,
    )


@pytest.mark.parametrize("split", SPLITS)
def test_an_update_records_the_log_probs_and_entropies_that_it_computed(
    subject: Subject, folder: Path, split: str
) -> None:
    """In the order of the batch, whatever the mini-batches, micro-batches and workers."""
    batch, objective = train_batch(), replace(OBJECTIVE, records_tokens=True)
    assert batch.old_logprobs_T is not None
    alone, pair = subject.build(folder), [subject.build(folder, **SPLITS[split]) for _ in range(2)]
    before_T = alone.score(batch)
    records = [TokenRecord.empty(len(batch.tokens_T)) for _ in range(2)]
    metrics = learner(alone, objective=objective).learn(batch, 1, record=records[0])
    learner(*pair, objective=objective).learn(batch, 1, record=records[1])
    expected_T = (before_T - batch.old_logprobs_T).exp()
    for record in records:
        torch.testing.assert_close(record.ratio_T[batch.mask_T], expected_T[batch.mask_T], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(record.entropy_T, records[0].entropy_T, rtol=1e-4, atol=1e-5)
    valid_T = batch.loss_mask_T
    assert float(records[0].entropy_T[valid_T].mean()) == pytest.approx(metrics["actor/entropy"], rel=0.05)


def test_tokens_are_not_recorded_unless_the_objective_records_them(subject: Subject, folder: Path) -> None:
    engine = subject.build(folder)
    learner(engine, objective=OBJECTIVE).accumulate(train_batch())
    assert engine.optim_step(0.0).outputs is None
