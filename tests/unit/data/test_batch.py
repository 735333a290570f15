from dataclasses import replace

import pytest
import torch

from rloom.batch import Batch, TokenMoments, Trajectory, Turn, masked_blocks, token_indices
from rloom.types import Prompt, Score
from tests.algos_samples import MIXED, batch_of


def trajectory(tokens: list[int], mask: list[int], score: Score) -> Trajectory:
    prompt = Prompt(index=0, messages=(), text="", tokens=(tokens[0],), data_source="arithmetic")
    logprobs_L = torch.tensor(mask, dtype=torch.float32) * -0.5
    turns = tuple(Turn(at, at + 1, version=0) for at, generated in enumerate(mask) if generated)
    return Trajectory(prompt, 3, torch.tensor(tokens), logprobs_L, turns, True, score)


def test_packing_lays_samples_end_to_end() -> None:
    first = trajectory([5, 6, 7], [0, 1, 1], Score(1.0))
    second = trajectory([8, 9], [0, 1], Score.failed("timed out"))
    batch = Batch.pack([first, second])
    assert first.answer_tokens == [6, 7] and batch.group_N.tolist() == [3, 3]
    assert batch.mask_T.tolist() == [False, True, True, False, True]
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 9]
    assert batch.rollout_logprobs_T.tolist() == [0, -0.5, -0.5, 0, -0.5]
    assert batch.length_N.tolist() == [3, 2]
    assert batch.sample_T.tolist() == [0, 0, 0, 1, 1]
    assert batch.score_N.tolist() == [1.0, 0.0]
    assert batch.valid_N.tolist() == [True, False]


def test_a_turn_of_one_version_has_one_run() -> None:
    turn = Turn(2, 5, version=3)
    assert turn == Turn.of_runs(2, [(3, 3)]) and turn.runs == (turn,)
    assert (turn.versions, turn.oldest, turn.newest) == ((3,), 3, 3)
    assert [turn.version_of(token) for token in (2, 3, 4)] == [3, 3, 3]


def test_a_turn_of_several_versions_has_a_run_of_tokens_for_each() -> None:
    """After a prompt of 2 tokens: 3 of version 5, none of 6, 1 and 1 of 7, 2 of 8."""
    turn = Turn.of_runs(2, [(3, 5), (0, 6), (1, 7), (1, 7), (2, 8)])
    assert turn == Turn(2, 9, version=8, earlier=((5, 5), (7, 7)))
    assert turn.runs == (Turn(2, 5, 5), Turn(5, 7, 7), Turn(7, 9, 8))
    assert [turn.version_of(token) for token in range(2, 9)] == [5, 5, 5, 7, 7, 8, 8]
    assert (turn.versions, turn.oldest, turn.newest) == ((5, 7, 8), 5, 8)


def test_runs_without_tokens_do_not_count() -> None:
    assert Turn.of_runs(4, [(2, 6), (0, 9)]) == Turn(4, 6, 6)
    assert Turn.of_runs(4, [(0, 5), (0, 6)]) == Turn(4, 4, 6), "an answer without a token"


def test_the_tokens_of_a_failed_sample_do_not_teach() -> None:
    batch = batch_of([".w", ".w-w"], [None, 1.0])
    assert batch.mask_T.tolist() == [False, True, False, True, False, True]
    assert batch.loss_mask_T.tolist() == [False, False, False, True, False, True]
    assert replace(batch, valid_N=torch.tensor([True, True])).loss_mask_T.tolist() == batch.mask_T.tolist()


def test_selecting_rows_carries_every_field_and_what_is_not_there() -> None:
    batch = replace(MIXED.train_batch(), chosen_T=torch.arange(len(MIXED.batch.mask_T)) % 2 == 0, ref_logprobs_T=None)
    picked = batch.select([4, 0])
    places = token_indices(batch.length_N, torch.tensor([4, 0]))
    start = int(batch.length_N[:4].sum())
    assert places.tolist() == [*range(start, start + 7), *range(5)]
    assert picked.length_N.tolist() == [7, 5]
    assert picked.group_N.tolist() == [1, 0]
    assert picked.advantages_T.tolist() == batch.advantages_T[places].tolist()
    assert picked.chosen_T.tolist() == batch.chosen_T[places].tolist()
    assert picked.ref_logprobs_T is None and picked.keep_T is None and picked.rollout_weights_T is None
    assert picked.to(torch.device("cpu")).keep_T is None


def test_what_rollout_correction_rejected_does_not_teach() -> None:
    batch = MIXED.train_batch()
    keep_T = torch.arange(len(batch.mask_T)) % 2 == 0
    rejected = replace(batch, keep_T=keep_T)
    assert rejected.loss_mask_T.tolist() == (batch.loss_mask_T & keep_T).tolist()
    assert rejected.mask_T.tolist() == batch.mask_T.tolist()
    assert rejected.select([1]).loss_mask_T.tolist() == rejected.loss_mask_T[5:12].tolist()


def test_moments_of_blocks_are_those_of_all_numbers() -> None:
    blocks = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 8.0]), torch.tensor([3.6])]
    sample, population, equal = TokenMoments(correction=1), TokenMoments(correction=0), TokenMoments(correction=1)
    for block in blocks:
        sample.add(block.double())
        population.add(block.double())
        equal.add(torch.full((3,), 0.1, dtype=torch.float64))
    assert (sample.count, sample.largest, sample.smallest) == (6, 8, 1)
    assert sample.mean == pytest.approx(3.6)
    # squares of the distances: 6.76, 2.56, 0.36, 0.16, 19.36, 0
    assert sample.variance == pytest.approx(29.2 / 5) and population.variance == pytest.approx(29.2 / 6)
    assert equal.variance == 0


def test_a_statistic_reads_a_few_tokens_of_the_mask_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rloom.batch.TOKENS_AT_ONCE", 3)
    mask_T = torch.tensor([1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
    found = [values.tolist() for (values,) in masked_blocks(mask_T, torch.arange(7))]
    assert found == [[0, 2], [6]], "a block without a token of the mask is left out"


def test_sums_and_counts_of_a_sample_are_over_its_tokens_in_the_mask() -> None:
    batch = replace(MIXED.train_batch(), tokens_T=torch.arange(12), length_N=torch.tensor([5, 7]))
    mask_T = torch.arange(12) % 2 == 0
    value_T = torch.arange(12).float().masked_fill(~mask_T, torch.inf)
    assert batch.sums(value_T, mask_T, torch.float64).tolist() == [0 + 2 + 4, 6 + 8 + 10]
    assert batch.counts(mask_T).tolist() == [3, 3]
    assert batch.at_tokens(torch.tensor([True, False])).tolist() == [True] * 5 + [False] * 7
    half = batch.sums(value_T.bfloat16(), mask_T, torch.bfloat16), batch.at_tokens(torch.tensor([1, 2]).bfloat16())
    assert half[0].tolist() == [6, 24] and half[1].tolist() == [1] * 5 + [2] * 7
