"""An update returns the log-prob and entropy of each token, if its objective records them. For every engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rloom.batch import TokenRecord
from rloom.packing import MicroBatching
from tests.engine_subjects import OBJECTIVE, Subject, learner
from tests.helpers import train_batch

SPLITS = {
    "eight": {"micro": MicroBatching(samples=1)},
    "by tokens": {"micro": MicroBatching(tokens=20)},
    "padded": {"packed": False},
    "checkpointed": {"checkpointing": True},
}


@pytest.mark.parametrize("split", SPLITS)
def test_an_update_records_the_log_probs_and_entropies_that_it_computed(
    subject: Subject, folder: Path, split: str
) -> None:
    """In the order of the batch, whatever the mini-batches, micro-batches and workers."""
    batch, objective = train_batch(), replace(OBJECTIVE, records_tokens=True)
    assert batch.old_logprobs_T is not None
    alone, pair = subject.build(folder), [subject.build(folder, **SPLITS[split]) for _ in range(2)]
    before_T = alone.score(batch)
    records = [TokenRecord.empty(batch) for _ in range(2)]
    metrics = learner(alone, objective=objective, rate=0.0).learn(batch, 1, record=records[0])
    learner(*pair, objective=objective, rate=0.0).learn(batch, 1, record=records[1])
    expected_T = (before_T - batch.old_logprobs_T).exp()
    for record in records:
        torch.testing.assert_close(record.ratio_T[batch.mask_T], expected_T[batch.mask_T], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(record.entropy_T, records[0].entropy_T, rtol=1e-4, atol=1e-5)
    valid_T = batch.loss_mask_T
    assert float(records[0].entropy_T[valid_T].mean()) == pytest.approx(metrics["actor/entropy"], rel=0.05)


def test_an_update_returns_the_outputs_of_the_recorded_samples_alone(subject: Subject, folder: Path) -> None:
    """The same numbers as those of all samples, in the order of the batch."""
    batch, objective = train_batch(), replace(OBJECTIVE, records_tokens=True)
    recorded_N = torch.arange(len(batch)) % 3 == 1
    some = replace(batch, recorded_N=recorded_N)
    records = []
    for one in (batch, some):
        pair = [subject.build(folder, micro=MicroBatching(tokens=20)) for _ in range(2)]
        records.append(TokenRecord.empty(one))
        learner(*pair, objective=objective, rate=0.0).learn(one, 1, record=records[-1])
    chosen_T = recorded_N[batch.sample_T]
    assert 0 < len(records[1].entropy_T) == int(chosen_T.sum()) < len(batch.tokens_T)
    torch.testing.assert_close(records[1].entropy_T, records[0].entropy_T[chosen_T], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(records[1].ratio_T, records[0].ratio_T[chosen_T], rtol=1e-5, atol=1e-6)
    assert float(records[1].entropy_T.max()) > 0


def test_tokens_are_not_recorded_unless_the_objective_records_them(subject: Subject, folder: Path) -> None:
    engine = subject.build(folder)
    learner(engine).accumulate(train_batch())
    assert engine.optim_step(0.0).outputs is None
