"""Workers that are called together. In one process a group is a list of objects; with Ray its workers are actors.

A batch is divided among the shares of a group. The workers of one share (ranks that divide a sequence or a model) get
the same arguments, and the result of the first of them counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Arguments = Sequence[tuple[Any, ...]]  # one tuple for each share


class Pending(Protocol):
    """Calls that may still be running."""

    def wait(self) -> list[Any]:
        """One result for each share, in order. Raises what the first failed worker raised."""


class Group(Protocol):
    @property
    def shares(self) -> int:
        """Parts into which a batch is divided."""

    def start(self, method: str, arguments: Arguments) -> Pending:
        """Call the method on every worker with the arguments of its share."""

    def stream(self, method: str, arguments: Arguments) -> Iterator[tuple[int, Any]]:
        """The same for a method that yields: (share, item) as they arrive."""

    def each(self, method: str, arguments: Arguments) -> list[Any]:
        return self.start(method, arguments).wait()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The same arguments for every worker."""
        return self.each(method, [arguments] * self.shares)


def for_workers(arguments: Arguments, workers_per_share: int) -> list[tuple[Any, ...]]:
    """The arguments of each worker, given those of each share."""
    return [of_share for of_share in arguments for _ in range(workers_per_share)]


@dataclass(frozen=True)
class Deferred:
    """Calls in this process. They run in `wait`, since nothing runs beside the caller."""

    run: Callable[[], list[Any]]

    def wait(self) -> list[Any]:
        return self.run()


class LocalGroup(Group):
    def __init__(self, workers: Sequence[object], *, workers_per_share: int = 1) -> None:
        assert len(workers) % workers_per_share == 0
        self.workers, self.workers_per_share = workers, workers_per_share

    @property
    def shares(self) -> int:
        return len(self.workers) // self.workers_per_share

    def start(self, method: str, arguments: Arguments) -> Pending:
        def run() -> list[Any]:
            each = zip(self.workers, for_workers(arguments, self.workers_per_share), strict=True)
            return [getattr(worker, method)(*own) for worker, own in each][:: self.workers_per_share]

        return Deferred(run)

    def stream(self, method: str, arguments: Arguments) -> Iterator[tuple[int, Any]]:
        for share, own in enumerate(arguments):
            for item in getattr(self.workers[share * self.workers_per_share], method)(*own):
                yield share, item
