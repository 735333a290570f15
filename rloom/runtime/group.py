"""Workers that do the same thing on different shares. In one process a group is a list; elsewhere it is remote."""

from collections.abc import Sequence
from typing import Any, Protocol


class Group(Protocol):
    @property
    def size(self) -> int: ...

    def each(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method on every worker with its own arguments; the results in the workers' order."""

    def close(self) -> None: ...


class LocalGroup:
    def __init__(self, workers: Sequence[object]) -> None:
        self.workers = workers

    @property
    def size(self) -> int:
        return len(self.workers)

    def each(self, method: str, args_per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(worker, method)(*args) for worker, args in zip(self.workers, args_per_worker, strict=True)]

    def close(self) -> None:
        """Its workers end with the process."""
