"""Allocation of contiguous ranges in the key-value cache."""


class RangeAllocator:
    """Allocates and releases ranges of a cache of `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = [(0, capacity)]  # (start, length), in order, never adjacent

    @property
    def free_tokens(self) -> int:
        return sum(length for _, length in self.free)

    def allocate(self, length: int) -> int | None:
        """The start of the first free range of at least `length` tokens, or None."""
        for i, (start, available) in enumerate(self.free):
            if available >= length:
                self.free[i : i + 1] = [(start + length, available - length)] if available > length else []
                return start
        return None

    def release(self, start: int, length: int) -> None:
        after = next((i for i, (other, _) in enumerate(self.free) if other > start), len(self.free))
        self.free.insert(after, (start, length))
        merged: list[tuple[int, int]] = []
        for begin, size in self.free:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self.free = merged
