"""What the driver sends of a step's batch, and how often."""

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from rloom.algos.objectives import ValueObjective
from rloom.batch import Batch, TrainBatch
from rloom.rollout.base import report_interval_s
from rloom.runtime.group import Deferred, LocalGroup, Pending, Stored
from rloom.runtime.pickling import SharedMemory
from rloom.runtime.processes import numbered, opened
from rloom.training.batch_store import BatchStore
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.roles import Learner, MiniBatching, Scorer
from tests.helpers import a_batch
from tests.unit.runtime.test_roles import Echo

TOKENS = 88  # of a_batch


class Sent(LocalGroup):
    """Workers of this process that get what forked ones would: values in shared memory, arguments in a message."""

    def __init__(self, workers: Sequence[object], *, workers_per_share: int = 1) -> None:
        super().__init__(workers, workers_per_share=workers_per_share)
        self.puts: list[int] = []  # bytes
        self.messages: list[int] = []

    def put(self, value: Any) -> Stored:
        stored = SharedMemory(value)
        self.puts.append(stored.bytes)
        return stored

    def start(self, method: str, arguments: Sequence[tuple[Any, ...]], *, stored: bool = False) -> Pending:
        messages = [bytes(numbered(1, own)) for own in arguments]
        self.messages += map(len, messages)
        pending = super().start(method, [opened(message)[1]() for message in messages])
        return Deferred(lambda: [SharedMemory(one) for one in pending.wait()]) if stored else pending


def learner(group: LocalGroup, *, prompts: int = 2, epochs: int = 1, shuffle: bool = False) -> Learner:
    return Learner(
        "critic",
        group,
        objective=ValueObjective(0.5, "token-mean"),
        mini_batching=MiniBatching(prompts, epochs, shuffle, 1, 16),
        schedule=LearningRateSchedule(0.1),
        balance=True,
        max_nonfinite=2,
    )


def scored_batch() -> Batch:
    batch = a_batch()
    return Batch(**{one.name: getattr(batch, one.name) for one in fields(Batch)})


def ppo_step(group: LocalGroup, batch: Batch, *, prompts: int = 2) -> None:
    """Three scoring passes, then the updates of two models."""
    roles = [learner(group, prompts=prompts) for _ in range(2)]
    store = roles[0].store(batch, 1)
    scorers = {
        "old_logprobs_T": roles[0].scorer, "ref_logprobs_T": Scorer(group, reference=True), "values_T": roles[1].scorer,
    }  # fmt: skip
    outputs = {name: scorer.start(batch, store).wait() for name, scorer in scorers.items()}
    for output_T in outputs.values():
        assert torch.equal(output_T.abs(), batch.tokens_T.float())
    on_driver = {name: torch.ones(len(batch.tokens_T)) for name in ("advantages_T", "returns_T")}
    for role in roles:
        role.learn(TrainBatch(**vars(batch), **outputs, **on_driver), 1, store=store)


# int32 tokens, mask, log-probs of the rollout; advantages and returns. The workers have put log-probs and values.
SENT_ONCE = (4 + 1 + 4) * TOKENS + 2 * 4 * TOKENS
OF_ROWS = 8 * (8 + 8 + 4 + 1)  # length, group, score, valid


@pytest.mark.parametrize("prompts", [1, 2, 4])
@pytest.mark.parametrize("workers_per_share", [1, 2])
def test_a_column_is_sent_once_a_step_however_many_passes_updates_and_workers_read_it(
    prompts: int, workers_per_share: int
) -> None:
    group = Sent([Echo() for _ in range(2 * workers_per_share)], workers_per_share=workers_per_share)
    ppo_step(group, scored_batch(), prompts=prompts)
    assert len(group.puts) == 4  # two pieces, of the batch and of what was computed since
    assert sum(group.puts) == SENT_ONCE + OF_ROWS


@pytest.mark.parametrize("workers", [1, 8, 64])
def test_what_is_sent_does_not_grow_with_the_workers(workers: int) -> None:
    """Eight groups of the batch: 64 samples, a sample for each of 64 workers."""
    batch, group = scored_batch().select([*range(8)] * 8), Sent([Echo() for _ in range(workers)])
    ppo_step(group, batch, prompts=4)
    assert sum(group.puts) == 8 * (SENT_ONCE + OF_ROWS)
    assert len(group.puts) == 2 * workers  # pieces of the batch, and of advantages and returns
    assert len(group.messages) == workers * (3 + 2 * 2)  # three passes, a mini-batch of all groups for each model
    assert max(group.messages) < 4000 and sum(group.messages) < 7 * (64 * 100 + 2500 * workers)


def test_an_output_that_a_worker_has_put_is_read_by_rows_in_any_order() -> None:
    batch, group = scored_batch(), Sent([Echo(), Echo()])
    pieces = [[0, 3, 5], [1, 2, 4, 6, 7]]
    store = BatchStore(group, batch.length_N, pieces)
    values_T = Scorer(group).start(batch, store).wait()
    ones_T = torch.ones(TOKENS)
    train_batch = TrainBatch(
        **vars(batch),
        advantages_T=ones_T,
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=values_T,
        returns_T=ones_T,
    )
    (named,) = store.rows(train_batch, [[7, 0, 2]])
    found = opened(bytes(numbered(1, named)))[1]().make()
    assert torch.equal(found.values_T, train_batch.select([7, 0, 2]).values_T)
    assert values_T.tolist() == batch.tokens_T.tolist()


def test_a_call_names_rows_so_its_size_does_not_depend_on_the_tokens() -> None:
    group = Sent([Echo(), Echo()])
    batch = scored_batch()
    wide = replace(
        batch,
        length_N=batch.length_N * 100,
        **{name: tensor.repeat_interleave(100) for name, tensor in batch.columns.items() if name.endswith("_T")},
    )
    for one in (batch, wide):
        Scorer(group).score(one)
    assert max(group.messages) - min(group.messages) < 50 and max(group.messages) < 2000


def test_rows_that_lie_in_several_pieces_arrive_in_the_order_of_the_share() -> None:
    batch = a_batch()
    store = BatchStore(Sent([Echo(), Echo()]), batch.length_N, [[0, 3, 5], [], [1, 2, 4, 6, 7]])
    shares = [[7, 0, 2, 3], []]
    for share, named in zip(shares, store.rows(batch, shares), strict=True):
        found, expected = opened(bytes(numbered(1, named)))[1]().make(), batch.select(share)
        assert {**found.columns}.keys() == expected.columns.keys()
        for name, tensor in expected.columns.items():
            assert torch.equal(found.columns[name], tensor) and found.columns[name].dtype == tensor.dtype


def test_a_column_that_was_computed_again_is_sent_again_and_columns_of_a_share_are_its_own() -> None:
    batch, shares = a_batch(), [[1, 2], [0]]
    store = BatchStore(Sent([Echo(), Echo()]), batch.length_N, [[0, 1], [2, 3, 4, 5, 6, 7]])
    store.rows(batch, shares)
    other = replace(batch, advantages_T=batch.advantages_T + 1)
    more = [
        {"values_T": torch.full((int(batch.length_N[share].sum()),), float(number))}
        for number, share in enumerate(shares)
    ]
    own = replace(other, values_T=None)
    for number, named in enumerate(store.rows(own, shares, more)):
        found = opened(bytes(numbered(1, named)))[1]().make()
        assert torch.equal(found.advantages_T, other.select(shares[number]).advantages_T)
        assert torch.equal(found.values_T, more[number]["values_T"])


def test_a_tensor_from_shared_memory_can_be_written_to_and_others_do_not_see_it() -> None:
    stored = SharedMemory({"x": torch.arange(3)})
    first, second = stored.get()["x"], stored.get()["x"]
    first.add_(1)
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [0, 1, 2])


def test_a_worker_reads_one_piece_in_all_updates_of_an_epoch() -> None:
    batch = a_batch()

    def pieces_read(**updates: Any) -> set[int]:
        of = learner(Sent([Echo(), Echo()]), **updates)
        store, counts = of.store(batch, 1), set()
        for rows in of.mini_batching.mini_batches(batch, 1):
            shares = [rows[share].tolist() for share in of.scorer.divided(batch.length_N[rows])]
            counts |= {len(one.pieces) for one in store.rows(batch, shares)}
        return counts

    assert pieces_read() == pieces_read(shuffle=True) == pieces_read(epochs=3) == {1}


def test_in_one_process_the_batch_is_not_copied_before_a_worker_reads_it() -> None:
    batch = a_batch()
    store = learner(LocalGroup([Echo()])).store(batch, 1)
    store.rows(batch, store.pieces)
    [(_, [stored])] = store.put
    assert np.shares_memory(stored.get()["tokens_T"][3], batch.tokens_T.numpy())


def test_a_message_has_the_bytes_of_a_view_and_not_of_all_that_it_is_a_view_of() -> None:
    view = torch.arange(100_000)[500:510]
    message = bytes(numbered(7, view))
    assert len(message) < 1000
    assert torch.equal(opened(message)[1](), view)
    half = torch.ones(3, dtype=torch.bfloat16)  # numpy has no such type
    assert torch.equal(opened(bytes(numbered(7, half)))[1](), half)


def test_shared_memory_is_given_back_when_the_driver_drops_it() -> None:
    stored = SharedMemory([np.arange(3)])
    file = stored.file
    assert stored.get()[0].tolist() == [0, 1, 2] and os.path.exists(file)
    stored.get()[0][:] = 7  # seen by this reader alone
    assert stored.get()[0].tolist() == [0, 1, 2]
    del stored
    assert not os.path.exists(file)


def test_tokens_in_the_loss_are_counted_by_sample_as_the_mask_has_them() -> None:
    batch = replace(a_batch(), keep_T=torch.arange(TOKENS) % 3 != 0)
    rows = torch.tensor([3, 0, 4])  # the score of row 4 failed
    counted = [int(part.sum()) for part in batch.loss_mask_T.split(batch.length_N.tolist())]
    assert batch.loss_tokens(rows).tolist() == [counted[3], counted[0], 0]


def test_engines_of_many_shares_report_less_often() -> None:
    assert [report_interval_s(shares) for shares in (1, 20, 64, 512)] == [0.1, 0.1, 0.32, 2.56]
