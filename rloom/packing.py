"""Assignment of samples to micro-batches, by count or by tokens, and to workers."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Longest first, one bin after the other, each as full as the budget allows; a sample above it gets its own bin.

    Attention may pad a bin to samples × longest, so that product is bounded too: one long sample among many short ones
    would otherwise cost far more than its tokens.
    """
    bins: list[list[int]] = []
    tokens = longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fits = bins and tokens + lengths[row] <= budget and (len(bins[-1]) + 1) * longest <= 2 * budget
        if fits:
            bins[-1].append(row)
            tokens += lengths[row]
        else:
            bins.append([row])
            tokens = longest = lengths[row]
    return bins


def share_sizes(rows: int, workers: int) -> list[int]:
    """Rows for each worker, as many for each give or take one; the first has the most."""
    fewest, over = divmod(rows, workers)
    return [fewest + (worker < over) for worker in range(workers)]


def share_rows(lengths: Sequence[int], workers: int, *, balance: bool) -> list[list[int]]:
    """Rows of each worker, by `share_sizes`: in order, or balanced by tokens."""
    rows, sizes = list(range(len(lengths))), share_sizes(len(lengths), workers)
    if not balance or workers == 1:
        ends = list(accumulate(sizes))
        return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        lightest = min((w for w in range(workers) if len(shares[w]) < sizes[w]), key=lambda w: (loads[w], w))
        shares[lightest].append(row)
        loads[lightest] += lengths[row]
    return [sorted(share) for share in shares]
