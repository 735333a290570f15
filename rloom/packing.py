"""Assignment of samples to micro-batches, by count or by tokens, and to workers."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate


@dataclass(frozen=True)
class MicroBatching:
    """How a batch is split into micro-batches: by a number of samples, or by a token budget."""

    samples: int | None = None
    tokens: int | None = None

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        """Rows of each micro-batch. Every row is in exactly one."""
        if self.samples is not None:
            rows = list(range(len(lengths)))
            return [rows[i : i + self.samples] for i in range(0, len(rows), self.samples)]
        assert self.tokens is not None, "either samples or tokens is set"
        return even_bins(lengths, self.tokens)


def even_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """As few bins as the budget allows, about equally full: the fullest determines the peak memory."""
    bins = fill_bins(lengths, budget)
    least, most = -(-sum(lengths) // max(len(bins), 1)), budget
    while least < most:  # the smallest budget with as few bins
        middle = (least + most) // 2
        if len(fill_bins(lengths, middle)) <= len(bins):
            most = middle
        else:
            least = middle + 1
    return fill_bins(lengths, most)


def fill_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Longest first, each into the fullest bin that has room for it (best-fit decreasing); a sample above the budget
    gets its own bin. Never more bins than if only the last one were open.

    Attention may pad a bin to samples × longest, so that product is bounded too: one long sample among many short ones
    would otherwise cost far more than its tokens.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int, int]] = []  # of each open bin, sorted: (tokens, number of the bin, samples)
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fullest = bisect_left(room, (lengths[row],))
        if fullest < len(room):
            tokens, number, samples = room.pop(fullest)
            bins[number].append(row)
        else:
            tokens, number, samples = budget, len(bins), 2 * budget // max(lengths[row], 1)
            bins.append([row])
        if tokens > lengths[row] and samples > 1:
            insort(room, (tokens - lengths[row], number, samples - 1))
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
