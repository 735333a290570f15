"""Groups of workers in this process: shares, and calls that run when they are waited for."""

from collections.abc import Generator

from rloom.runtime.group import LocalGroup


class Counting:
    def __init__(self) -> None:
        self.given: list[int] = []

    def double(self, number: int) -> int:
        self.given.append(number)
        return 2 * number

    def doubles(self) -> Generator[list[int], list[int], None]:
        doubled: list[int] = []
        try:
            while True:
                numbers = yield doubled
                doubled = [self.double(number) for number in numbers]
        finally:
            self.given.append(-1)


def test_a_call_runs_when_it_is_waited_for() -> None:
    worker = Counting()
    pending = LocalGroup([worker]).start("double", [(4,)])
    assert worker.given == []
    assert pending.wait() == [8] and worker.given == [4]


def test_the_workers_of_a_share_get_the_same_and_the_first_answers() -> None:
    workers = [Counting() for _ in range(4)]
    group = LocalGroup(workers, workers_per_share=2)
    assert group.shares == 2
    assert group.each("double", [(1,), (5,)]) == [2, 10]
    assert [worker.given for worker in workers] == [[1], [1], [5], [5]]
    assert group.call("double", 3) == [6, 6]


def test_the_shares_of_a_stream_take_turns_until_nothing_is_left_for_them() -> None:
    workers = [Counting() for _ in range(4)]
    left = {0: [[1, 2], [3]], 1: [[], [5], []]}
    stream = LocalGroup(workers, workers_per_share=2).stream(
        "doubles", lambda share: left[share].pop(0) if left[share] else None
    )
    assert list(stream) == [(0, [2, 4]), (1, []), (0, [6]), (1, [10]), (1, [])]
    assert [worker.given for worker in workers] == [[1, 2, 3, -1], [1, 2, 3, -1], [5, -1], [5, -1]]
