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
        share_of: Sequence[int | None] = (),  # of each group, the share that has caches of its answers
    ) -> None:
        later, groups = (groups, ()) if any(share is not None for share in share_of) else ((), groups)
        self.groups = [*groups]
        self.first_row = [0, *accumulate(map(len, groups))]
        self.limited = max_unfinished is not None and shares > 1
        self.max_unfinished = max_unfinished if max_unfinished is not None and shares > 1 else self.first_row[-1]
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
        self.sent_next = [[first[index] for index in portion] for portion in portions]
        self.add(later, share_of)

    def add(self, groups: Sequence[Sequence[Request]], share_of: Sequence[int | None] = ()) -> None:
        """Groups that were not there at first. Each goes to its share, whatever its load: it has had them before. Those
        without go to the share with the fewest unfinished requests."""
        first = len(self.groups)
        self.groups += groups
        self.first_row = [0, *accumulate(map(len, self.groups))]
        if not self.limited:
            self.max_unfinished = self.first_row[-1]
        loads = [
            unfinished + sum(len(self.groups[group]) for group in sent_next)
            for unfinished, sent_next in zip(self.unfinished, self.sent_next, strict=True)
        ]
        own = {first + index: share for index, share in enumerate(share_of) if share is not None}
        lengths = [len(group[0].tokens) for group in self.groups]
        for group in sorted(range(first, len(self.groups)), key=lambda group: (group not in own, -lengths[group])):
            share = own.get(group, min(range(len(loads)), key=loads.__getitem__))
            if group in own or loads[share] < self.max_unfinished:
                self.sent_next[share].append(group)
                loads[share] += len(self.groups[group])
            else:
                self.waiting.append(group)

    @property
    def has_unfinished(self) -> bool:
        """Of any share, or not yet sent."""
        return self.finished < self.first_row[-1]

    def next_requests(self, share: int) -> list[Request] | None:
        """Requests to send to the share now, maybe none. None: it has finished, and nothing is left for it."""
        groups, self.sent_next[share] = self.sent_next[share], []
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
