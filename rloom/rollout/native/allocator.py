"""Allocation of the key-value cache's pages."""

from collections.abc import Sequence


class PageAllocator:
    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free = list(range(pages))[::-1]  # the last one is allocated next

    def allocate(self, count: int) -> list[int]:
        assert count <= len(self.free)
        return [self.free.pop() for _ in range(count)]

    def release(self, pages: Sequence[int]) -> None:
        self.free.extend(reversed(pages))
