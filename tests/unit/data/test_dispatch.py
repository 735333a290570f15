"""Which share gets which rows, and when."""

from collections.abc import Sequence

from rloom.rollout.base import Request, Sampling
from rloom.training.dispatch import Dispatcher


def requests(lengths: Sequence[int], n: int = 1) -> list[list[Request]]:
    """A group for each length. The seed is the row."""
    sampling = Sampling(max_new_tokens=4)
    return [
        [Request(tuple(range(length)), sampling, group * n + member) for member in range(n)]
        for group, length in enumerate(lengths)
    ]


def rows(dispatcher: Dispatcher, share: int) -> list[int] | None:
    found = dispatcher.next_requests(share)
    return None if found is None else [request.seed for request in found]


def test_what_fits_is_divided_at_once_and_balanced_by_tokens() -> None:
    for limit in (3, 100, None):
        dispatcher = Dispatcher(requests([9, 1, 8, 4, 1, 3]), 2, limit)
        assert [rows(dispatcher, share) for share in (0, 1)] == [[0, 1, 5], [2, 3, 4]]
        assert [rows(dispatcher, share) for share in (0, 1)] == [[], []]


def test_a_share_gets_the_next_prompt_when_it_has_finished_one_answer() -> None:
    dispatcher = Dispatcher(requests([7] * 6), 2, max_unfinished=2)
    assert [rows(dispatcher, share) for share in (0, 1)] == [[0, 2], [1, 3]]
    assert (rows(dispatcher, 0), rows(dispatcher, 1)) == ([], [])
    assert dispatcher.finish(1, 1) == 3
    assert (rows(dispatcher, 0), rows(dispatcher, 1)) == ([], [4])
    assert [dispatcher.finish(1, index) for index in (2, 0)] == [4, 1]
    assert (rows(dispatcher, 1), rows(dispatcher, 0)) == ([5], [])
    assert dispatcher.finish(1, 3) == 5
    assert rows(dispatcher, 1) is None, "nothing is left for it"
    assert rows(dispatcher, 0) == [], "it has not finished"
    assert [dispatcher.finish(0, index) for index in (0, 1)] == [0, 2]
    assert rows(dispatcher, 0) is None and dispatcher.finished == 6


def test_the_answers_to_a_prompt_stay_together_even_if_they_are_more_than_the_limit() -> None:
    dispatcher = Dispatcher(requests([5, 5, 5], n=4), 2, max_unfinished=3)
    assert [rows(dispatcher, share) for share in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    dispatcher.finish(0, 0)
    assert rows(dispatcher, 0) == [], "three are unfinished"
    dispatcher.finish(0, 1)
    assert rows(dispatcher, 0) == [8, 9, 10, 11]


def test_the_longest_prompts_are_first_so_that_later_ones_fit_what_was_allocated_for_them() -> None:
    dispatcher = Dispatcher(requests([1, 2, 9, 3, 8, 4]), 2, max_unfinished=1)
    assert [rows(dispatcher, share) for share in (0, 1)] == [[2], [4]]
    dispatcher.finish(0, 0)
    assert rows(dispatcher, 0) == [5]


def test_one_share_gets_everything_at_once() -> None:
    assert rows(Dispatcher(requests([1, 3, 2]), 1, max_unfinished=1), 0) == [0, 1, 2]


def test_fewer_prompts_than_shares_leave_a_share_without_work() -> None:
    dispatcher = Dispatcher(requests([6], n=2), 2, max_unfinished=8)
    assert (rows(dispatcher, 0), rows(dispatcher, 1)) == ([0, 1], None)


def test_groups_that_come_later_go_to_the_share_with_the_fewest_unfinished_answers() -> None:
    dispatcher = Dispatcher(requests([5, 5, 5]), 2, max_unfinished=3)
    assert [rows(dispatcher, share) for share in (0, 1)] == [[0, 2], [1]]
    more = requests([5, 5, 5, 7, 6, 5])
    dispatcher.add(more[3:])
    assert dispatcher.has_unfinished
    assert rows(dispatcher, 1) == [3, 5], "the longest first, to the share with one; then both have two"
    assert rows(dispatcher, 0) == [4], "then both have three"
    for share, index in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        assert dispatcher.has_unfinished
        dispatcher.finish(share, index)
    assert not dispatcher.has_unfinished
    alone = Dispatcher([], 1, max_unfinished=1)
    assert rows(alone, 0) is None
    alone.add(requests([4, 4], n=2))
    assert rows(alone, 0) == [0, 1, 2, 3], "one share gets everything"


def test_groups_with_caches_go_to_their_shares_and_the_others_to_those_with_the_fewest_unfinished_answers() -> None:
    dispatcher = Dispatcher(requests([5, 5, 5, 5, 9, 5], n=2), 2, 8, [None, 0, 0, 0, None, None])
    assert [rows(dispatcher, share) for share in (0, 1)] == [[2, 3, 4, 5, 6, 7], [8, 9, 0, 1, 10, 11]]
    assert dispatcher.finish(1, 1) == 9
    full = Dispatcher(requests([5, 5, 5, 5]), 2, 2, [0, 0, 0, None])
    assert [rows(full, share) for share in (0, 1)] == [[0, 1, 2], [3]], "it had them before, whatever the limit"
    assert rows(Dispatcher(requests([5, 5]), 1, None, [0, None]), 0) == [0, 1]
