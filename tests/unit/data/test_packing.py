"""Which rows go together, with numbers small enough to check by eye."""

from math import exp
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloom import packing
from rloom.packing import MicroBatching, rows_together, share_rows
from rloom.runs.metrics import ModelWork


def fill_bins(lengths: list[int], budget: int) -> list[list[int]]:
    """Rows that share no prompt."""
    return packing.fill_bins(rows_together(lengths, None, budget), budget)


def test_by_count_rows_stay_in_order_and_the_last_micro_batch_is_what_is_left() -> None:
    assert MicroBatching(samples=3).cut([9, 1, 5, 2, 7, 3, 8]) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_count_goes_before_a_token_budget() -> None:
    assert MicroBatching(samples=2, tokens=1).cut([5, 5, 5]) == [[0, 1], [2]]


def test_by_tokens_the_longest_go_first_each_into_the_fullest_bin_with_room() -> None:
    # 9 | 7 | 5 + 4; then the 1 fits into each: with the 9, which has the least room
    assert fill_bins([4, 9, 1, 7, 5], 10) == [[1, 2], [3], [4, 0]]


def test_a_bin_that_has_room_stays_open() -> None:
    # 6 + 4, 6 + 4; with only the last bin open: 6, 6 + 4, 4
    assert fill_bins([6, 6, 4, 4], 10) == [[0, 2], [1, 3]]


def test_one_long_sample_does_not_drag_many_short_ones_to_its_length() -> None:
    # attention lays a bin out as samples × longest: 4 × 8 = 32 > 2 × 15, so the third 1 opens a bin of its own
    assert fill_bins([8, 1, 1, 1], 15) == [[0, 1, 2], [3]]


def test_of_equal_lengths_the_earlier_row_goes_first() -> None:
    assert fill_bins([2, 2, 2, 2], 4) == [[0, 1], [2, 3]]


def test_a_sample_over_the_budget_gets_a_bin_of_its_own() -> None:
    assert fill_bins([3, 50, 4], 10) == [[1], [2, 0]]


def test_a_budget_is_filled_to_the_last_token() -> None:
    assert fill_bins([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]


def test_passes_are_as_few_as_the_budget_allows_and_about_equally_full() -> None:
    assert [len(rows) for rows in MicroBatching(tokens=50).cut([10] * 12)] == [4, 4, 4]  # not 5, 5 and 2
    assert [len(rows) for rows in MicroBatching(tokens=50).cut([10] * 10)] == [5, 5]


def test_no_rows_make_no_micro_batches() -> None:
    assert MicroBatching(samples=4).cut([]) == MicroBatching(tokens=4).cut([]) == []


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60))
def test_every_row_is_in_exactly_one_bin_and_no_shared_bin_is_over_the_budget(lengths: list[int], budget: int) -> None:
    bins = fill_bins(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    shared = [[lengths[row] for row in rows] for rows in bins if len(rows) > 1]
    assert all(sum(rows) <= budget and len(rows) * max(rows) <= 2 * budget for rows in shared)


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60))
def test_passes_are_never_more_than_with_only_the_last_bin_open(lengths: list[int], budget: int) -> None:
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        last = bins[-1] if bins else []
        if last and sum(last) + length <= budget and (len(last) + 1) * last[0] <= 2 * budget:
            last.append(length)
        else:
            bins.append([length])
    assert len(fill_bins(lengths, budget)) <= len(bins)
    assert len(MicroBatching(tokens=budget).cut(lengths)) <= len(bins)


def test_without_balance_workers_get_rows_in_order() -> None:
    assert share_rows([9, 9, 1, 1], 2, balance=False) == [[0, 1], [2, 3]]


def test_balanced_workers_get_as_many_rows_and_about_as_many_tokens() -> None:
    # 9 -> A, 8 -> B, 4 -> B (8 < 9), 3 -> A (9 < 12), 1 -> A or B: both 12, A first, 1 -> B
    assert share_rows([9, 1, 8, 4, 1, 3], 2, balance=True) == [[0, 1, 5], [2, 3, 4]]


def test_balance_evens_out_what_the_order_would_not() -> None:
    lengths = [100, 100, 100, 100, 1, 1, 1, 1]
    shares = share_rows(lengths, 4, balance=True)
    assert [sum(lengths[row] for row in rows) for rows in shares] == [101, 101, 101, 101]


def test_a_long_row_is_alone_where_workers_may_have_different_numbers_of_rows() -> None:
    assert share_rows([90, 20, 20, 20, 20, 10], 2, balance=True, equal_rows=False) == [[0], [1, 2, 3, 4, 5]]
    # with three for each: 90 -> A, 20s -> B until it has three, the rest -> A
    assert share_rows([90, 20, 20, 20, 20, 10], 2, balance=True) == [[0, 4, 5], [1, 2, 3]]


@pytest.mark.parametrize("rows", [256, 512])
def test_of_64_workers_at_32k_the_slowest_has_a_tenth_more_than_the_mean_or_the_longest_row(rows: int) -> None:
    # lengths whose logarithm has the quantiles of a normal distribution: median 4,000, 16 % above 10,900
    ranks = [(row + 0.5) / rows for row in range(rows)]
    lengths = [min(32768, round(4000 * exp(NormalDist().inv_cdf(rank)))) for rank in ranks]
    # Qwen2.5-0.5B: 494 M parameters, 24 layers of 14 heads with keys and values of 64 numbers each
    work = ModelWork(494e6, 494e6, {None: 24 * 14 * 128}).update_flops(torch.tensor(lengths)).tolist()
    most = max(1.1 * sum(work) / 64, *work)
    shares = share_rows(work, 64, balance=True, equal_rows=False)
    assert max(sum(work[row] for row in share) for share in shares) <= most
    by_tokens = share_rows(lengths, 64, balance=True)
    assert max(sum(work[row] for row in share) for share in by_tokens) > most


def test_one_worker_gets_everything_in_order() -> None:
    assert share_rows([1, 5, 3], 1, balance=True) == [[0, 1, 2]]


def test_rows_that_do_not_divide_leave_some_workers_one_fewer() -> None:
    assert share_rows([1, 2, 3, 4, 5], 3, balance=False) == [[0, 1], [2, 3], [4]]
    # 5 -> A, 4 -> B, 3 -> C, 2 -> B or A? C is the lightest and full: B (4 < 5), then 1 -> A
    assert share_rows([1, 2, 3, 4, 5], 3, balance=True) == [[0, 4], [1, 3], [2]]
    assert share_rows([7], 3, balance=True) == [[0], [], []]


@given(st.integers(1, 6), st.lists(st.integers(1, 99), min_size=1, max_size=8), st.booleans())
def test_each_worker_gets_as_many_rows_and_each_row_one_worker(workers: int, some: list[int], balance: bool) -> None:
    lengths = some * workers
    shares = share_rows(lengths, workers, balance=balance)
    assert [len(rows) for rows in shares] == [len(some)] * workers
    assert sorted(row for rows in shares for row in rows) == list(range(len(lengths)))
    if balance:
        loads = [sum(lengths[row] for row in rows) for rows in shares]
        assert max(loads) - min(loads) <= max(lengths)
