"""Which rollout workers generate which requests: each share gets a first portion, and more as it finishes answers."""

from collections import deque
from collections.abc import Sequence

from rloom.packing import share_rows
from rloom.rollout.base import Request


class Dispatcher:
    """A share gets prompts while its unfinished requests are fewer than `max_unfinished`.

    The first portions are equal in number of prompts. They are the whole step if the limit allows it, or if there is
    one share. The answers to one prompt stay together, since its keys and values are computed once.
    """

    def __init__(
        self,
        requests: Sequence[Request],  # `answers_per_prompt` adjacent ones for each prompt
        answers_per_prompt: int,
        shares: int,
        max_unfinished: int | None,  # of a share. None: no limit
    ) -> None:
        self.requests, self.answers_per_prompt = requests, answers_per_prompt
        self.max_unfinished = len(requests) if max_unfinished is None or shares == 1 else max_unfinished
        self.sent: list[list[int]] = [[] for _ in range(shares)]  # rows of each share, in this order
        self.unfinished = [0] * shares
        self.finished = 0
        lengths = [len(request.tokens) for request in requests[::answers_per_prompt]]
        # longest first: an engine allocates for the requests that it has, and later prompts fit into that
        prompts = sorted(range(len(lengths)), key=lambda prompt: (-lengths[prompt], prompt))
        at_first = shares * min(ceil_div(len(prompts), shares), ceil_div(self.max_unfinished, answers_per_prompt))
        first, self.waiting = sorted(prompts[:at_first]), deque(prompts[at_first:])
        portions = share_rows([lengths[prompt] for prompt in first], shares, balance=True)
        self.first_prompts = [[first[index] for index in portion] for portion in portions]

    def next_requests(self, share: int) -> list[Request] | None:
        """Requests to send to the share now, maybe none. None: it has finished, and nothing is left for it."""
        prompts, self.first_prompts[share] = self.first_prompts[share], []
        unfinished = self.unfinished[share] + len(prompts) * self.answers_per_prompt
        while self.waiting and unfinished < self.max_unfinished:
            prompts.append(self.waiting.popleft())
            unfinished += self.answers_per_prompt
        rows = [row for prompt in prompts for row in self.rows_of(prompt)]
        self.sent[share] += rows
        self.unfinished[share] = unfinished
        return [self.requests[row] for row in rows] if unfinished else None

    def rows_of(self, prompt: int) -> range:
        return range(prompt * self.answers_per_prompt, (prompt + 1) * self.answers_per_prompt)

    def finish(self, share: int, index: int) -> int:
        """The row of the share's request with this index, which is finished."""
        self.unfinished[share] -= 1
        self.finished += 1
        return self.sent[share][index]


def ceil_div(count: int, divisor: int) -> int:
    return -(-count // divisor)
