"""Assignment of samples to micro-batches, by count or by tokens, and to workers."""

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple


class RowPrompt(NamedTuple):
    """The first `tokens` tokens of a row. Rows with equal keys begin with the same ones."""

    key: Hashable
    tokens: int


class Rows(NamedTuple):
    """Rows that go into one micro-batch together."""

    numbers: list[int]
    tokens: int
    longest: int


@dataclass(frozen=True)
class MicroBatching:
    """How a batch is split into micro-batches: by a number of samples, or by a token budget."""

    samples: int | None = None
    tokens: int | None = None

    def cut(self, lengths: Sequence[int], prompts: Sequence[RowPrompt] | None = None) -> list[list[int]]:
        """Rows of each micro-batch. Every row is in exactly one. `prompts`: by tokens, rows that share one go together.
        The budget counts it for each: keys, values and hidden states of all tokens are kept."""
        if self.samples is not None:
            rows = list(range(len(lengths)))
            return [rows[i : i + self.samples] for i in range(0, len(rows), self.samples)]
        assert self.tokens is not None, "either samples or tokens is set"
        return even_bins(rows_together(lengths, prompts, self.tokens), self.tokens)


def rows_together(lengths: Sequence[int], prompts: Sequence[RowPrompt] | None, budget: int) -> list[Rows]:
    """Each row alone, or as many with the same prompt as the budget allows."""
    if prompts is None:
        return [Rows([row], length, length) for row, length in enumerate(lengths)]
    found: list[Rows] = []
    open_rows: dict[Hashable, int] = {}  # the place in `found` of the last ones with a prompt
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        place = open_rows.get(prompt.key, -1)
        if place >= 0:
            one, tokens = found[place], found[place].tokens + length
            longest = max(one.longest, length)
            if tokens <= budget and (len(one.numbers) + 1) * longest <= 2 * budget:
                found[place] = Rows([*one.numbers, row], tokens, longest)
                continue
        open_rows[prompt.key] = len(found)
        found.append(Rows([row], length, length))
    return found


def even_bins(together: Sequence[Rows], budget: int) -> list[list[int]]:
    """As few bins as the budget allows, about equally full: the fullest determines the peak memory."""
    bins = fill_bins(together, budget)
    least, most = -(-sum(rows.tokens for rows in together) // max(len(bins), 1)), budget
    while least < most:  # the smallest budget with as few bins
        middle = (least + most) // 2
        if len(fill_bins(together, middle)) <= len(bins):
            most = middle
        else:
            least = middle + 1
    return fill_bins(together, most)


def fill_bins(together: Sequence[Rows], budget: int) -> list[list[int]]:
    """Longest first, each into the fullest bin that has room for it (best-fit decreasing); rows above the budget get
    their own bin. Of single rows never more bins than if only the last one were open.

    Attention may pad a bin to samples × longest, so that product is bounded too: one long sample among many short ones
    would otherwise cost far more than its tokens.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int, int]] = []  # of each open bin, sorted: (tokens, number of the bin, samples)
    for rows in sorted(together, key=lambda rows: (-rows.longest, rows.numbers[0])):
        fitting = range(bisect_left(room, (rows.tokens,)), len(room))
        fullest = next((place for place in fitting if room[place][2] >= len(rows.numbers)), None)
        if fullest is None:
            tokens, number, samples = budget, len(bins), 2 * budget // max(rows.longest, 1)
            bins.append([*rows.numbers])
        else:
            tokens, number, samples = room.pop(fullest)
            bins[number] += rows.numbers
        tokens, samples = tokens - rows.tokens, samples - len(rows.numbers)
        if tokens > 0 and samples > 0:
            insort(room, (tokens, number, samples))
    return bins


def share_sizes(rows: int, workers: int) -> list[int]:
    """Rows for each worker, as many for each give or take one; the first has the most."""
    fewest, over = divmod(rows, workers)
    return [fewest + (worker < over) for worker in range(workers)]


def share_rows(loads: Sequence[float], workers: int, *, balance: bool, equal_rows: bool = True) -> list[list[int]]:
    """Rows of each worker: in order, or balanced by the load of each row. `equal_rows`: as many as `share_sizes` says,
    which rows in order always are."""
    rows, sizes = list(range(len(loads))), share_sizes(len(loads), workers)
    if not balance or workers == 1:
        ends = list(accumulate(sizes))
        return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    shares: list[list[int]] = [[] for _ in range(workers)]
    lightest = [(0.0, worker) for worker in range(min(workers, len(rows)))]  # a heap
    for row in sorted(rows, key=lambda row: (-loads[row], row)):
        load, worker = heappop(lightest)
        shares[worker].append(row)
        if not equal_rows or len(shares[worker]) < sizes[worker]:
            heappush(lightest, (load + loads[row], worker))
    return [sorted(share) for share in shares]
