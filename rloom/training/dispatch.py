"""Which rollout workers generate which requests: each share gets a first portion, and more as it finishes answers."""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from rloom.packing import share_rows
from rloom.rollout.base import Request


class Dispatcher:
    """A share gets groups while its unfinished requests are fewer than `max_unfinished`.

    The first portions are equal in number of groups. They are the whole step if the limit allows it, or if there is one
    share. The answers to one prompt stay together, since its keys and values are computed once.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Request]],  # the requests of each prompt; a row counts them through all groups
        shares: int,
        max_unfinished: int | None,  # of a share. None: no limit
    ) -> None:
        self.groups = groups
        self.first_row = [0, *accumulate(map(len, groups))]
        self.max_unfinished = self.first_row[-1] if max_unfinished is None or shares == 1 else max_unfinished
        self.sent: list[list[int]] = [[] for _ in range(shares)]  # rows of each share, in this order
        self.unfinished = [0] * shares
        self.finished = 0
        lengths = [len(group[0].tokens) for group in groups]
        # those that were begun in an earlier step first, since training waits for them; then the longest: an engine
        # allocates for the requests that it has, and later prompts fit into that
        begun = [any(request.begun is not None for request in group) for group in groups]
        order = sorted(range(len(groups)), key=lambda group: (not begun[group], -lengths[group], group))
        largest = max(map(len, groups), default=1)
        at_first = shares * min(ceil_div(len(groups), shares), ceil_div(self.max_unfinished, largest))
        first, self.waiting = sorted(order[:at_first]), deque(order[at_first:])
        portions = share_rows([lengths[group] for group in first], shares, balance=True)
        self.first_groups = [[first[index] for index in portion] for portion in portions]

    def next_requests(self, share: int) -> list[Request] | None:
        """Requests to send to the share now, maybe none. None: it has finished, and nothing is left for it."""
        groups, self.first_groups[share] = self.first_groups[share], []
        unfinished = self.unfinished[share] + sum(len(self.groups[group]) for group in groups)
        while self.waiting and unfinished < self.max_unfinished:
            groups.append(self.waiting.popleft())
            unfinished += len(self.groups[groups[-1]])
        self.sent[share] += [row for group in groups for row in self.rows_of(group)]
        self.unfinished[share] = unfinished
        return [request for group in groups for request in self.groups[group]] if unfinished else None

    def rows_of(self, group: int) -> range:
        return range(self.first_row[group], self.first_row[group + 1])

    def finish(self, share: int, index: int) -> int:
        """The row of the share's request with this index, which is finished."""
        self.unfinished[share] -= 1
        self.finished += 1
        return self.sent[share][index]


def ceil_div(count: int, divisor: int) -> int:
    return -(-count // divisor)
