"""Groups of workers in this process: shares, and calls that run when they are waited for."""

from collections.abc import Iterator

from rloom.runtime.group import LocalGroup


class Counting:
    def __init__(self) -> None:
        self.given: list[int] = []

    def double(self, number: int) -> int:
        self.given.append(number)
        return 2 * number

    def upto(self, number: int) -> Iterator[int]:
        self.given.append(number)
        yield from range(number)


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
    assert list(group.stream("upto", [(2,), (1,)])) == [(0, 0), (0, 1), (1, 0)]
    assert [worker.given[-1] for worker in workers] == [2, 3, 1, 3]  # only the first of a share yields
