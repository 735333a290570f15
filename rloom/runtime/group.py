"""Workers that do the same thing on different shares. In one process a group is a list; elsewhere it is remote."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Group(Protocol):
    @property
    def size(self) -> int: ...

    def each(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method on every worker with its own arguments; the results in the workers' order."""

    def stream(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """The same for a method that yields: (worker, item) as they come."""


class LocalGroup:
    def __init__(self, workers: Sequence[object]) -> None:
        self.workers = workers

    @property
    def size(self) -> int:
        return len(self.workers)

    def each(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(worker, method)(*args) for worker, args in zip(self.workers, args_per_worker, strict=True)]

    def stream(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        for number, (worker, args) in enumerate(zip(self.workers, args_per_worker, strict=True)):
            for item in getattr(worker, method)(*args):
                yield number, item
