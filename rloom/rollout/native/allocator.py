"""Which places of the key-value cache are taken."""


class RangeAllocator:
    """Hands out stretches of `capacity` places, and takes them back."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = [(0, capacity)]  # (start, length), in order, never touching

    @property
    def free_tokens(self) -> int:
        return sum(length for _, length in self.free)

    def allocate(self, length: int) -> int | None:
        """The start of a free stretch so long, or None when there is none: the first that fits."""
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
