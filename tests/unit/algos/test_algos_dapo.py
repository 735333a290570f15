from dataclasses import replace

import pytest
import torch

from rloom.algos.estimators import Overlong, Shaping, informative_groups, overlong_penalty
from tests.algos_samples import batch_of


def test_the_overlong_penalty_falls_over_the_last_tokens() -> None:
    lengths = torch.tensor([10, 80, 85, 90, 100])
    found = overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -2.0])


def test_an_answer_at_the_limit_is_punished_in_full_and_no_further() -> None:
    assert overlong_penalty(torch.tensor([100, 130]), 100, 100, 1.0).tolist() == [-1.0, -1.0]


def test_groups_teach_where_two_valid_scores_differ() -> None:
    score_N = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.5, 0.0])
    group_N = torch.tensor([4, 4, 2, 2, 7, 7, 9, 9])
    valid_N = torch.tensor([True, True, True, True, False, True, False, False])
    # groups 2, 4, 7, 9: different, equal, one failed, both failed
    assert informative_groups(score_N, group_N, valid_N).tolist() == [True, False, False, False]


def test_a_failed_score_is_no_zero_to_differ_from() -> None:
    score_N, valid_N = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([True, True, False] * 2)
    assert informative_groups(score_N, torch.tensor([0, 0, 0, 1, 1, 1]), valid_N).tolist() == [False, False]


def test_a_group_of_one_teaches_nothing() -> None:
    assert informative_groups(torch.tensor([1.0]), torch.tensor([0]), torch.tensor([True])).tolist() == [False]


def test_penalties_of_long_and_of_truncated_answers_come_before_the_range() -> None:
    batch = replace(batch_of([".ww", ".w", ".wwww"], [1.0, 9.0, 2.0]), finished_N=torch.tensor([True, True, False]))
    overlong = Overlong(max_length=4, buffer=2, factor=1.0)
    assert Shaping(overlong).scores(batch).tolist() == [1.0, 9.0, 1.0]
    assert Shaping(overlong, truncated=0.5, score_range=(-1.0, 3.0)).scores(batch).tolist() == [1.0, 3.0, 0.5]
    assert Shaping(truncated=-2.0, score_range=(-1.0, 10.0)).scores(batch).tolist() == [1.0, 9.0, -1.0]
