"""Workers that are called together. In one process a group is a list of objects; else its workers are
processes, or actors of Ray.

A batch is divided among the shares of a group. The workers of one share (ranks that divide a sequence or a model) get
the same arguments, and the result of the first of them counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Protocol

Arguments = Sequence[tuple[Any, ...]]  # one tuple for each share
NextItems = Callable[[int], Sequence[Any] | None]  # what to send to this share next; None: nothing more
Stream = Generator[tuple[int, Any], None, None]


class Stored(Protocol):
    """A value that was put where all workers read it. It is there as long as this object exists on the driver."""

    def get(self) -> Any:
        """On the driver and on workers. Nothing may be written to arrays in it: several processes read one memory."""


class LazyArgument(ABC):
    """An argument of a call that the worker makes itself, of stored values."""

    @abstractmethod
    def make(self) -> Any: ...


def made(arguments: Sequence[Any]) -> list[Any]:
    return [one.make() if isinstance(one, LazyArgument) else one for one in arguments]


class Pending(Protocol):
    """Calls that may still be running."""

    def wait(self) -> list[Any]:
        """One result for each share, in order. Raises what the first failed worker raised."""


class Group(Protocol):
    @property
    def shares(self) -> int:
        """Parts into which a batch is divided."""

    def put(self, value: Any) -> Stored:
        """Copied once, however many workers read it, of this group or of another one of the run."""

    def start(self, method: str, arguments: Arguments, *, stored: bool = False) -> Pending:
        """Call the method on every worker with the arguments of its share.

        `stored`: each result is put by its worker, and `wait` returns Stored values, which other calls may name.
        """

    def stream(self, method: str, next_items: NextItems) -> Stream:
        """For a method that returns a generator: send it items and yield (share, what it yielded), as they arrive.

        `next_items` is called when a share is due its next items, possibly one answer ahead, until it returns None. The
        workers of a share are sent the same items in the same order. Closed early, it closes the workers' generators.
        """

    def each(self, method: str, arguments: Arguments) -> list[Any]:
        return self.start(method, arguments).wait()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The same arguments for every worker."""
        return self.each(method, [arguments] * self.shares)


def for_workers(arguments: Arguments, workers_per_share: int) -> list[tuple[Any, ...]]:
    """The arguments of each worker, given those of each share."""
    return [of_share for of_share in arguments for _ in range(workers_per_share)]


@dataclass(frozen=True)
class StoredHere:
    """A value of this process, which is not copied."""

    value: Any

    def get(self) -> Any:
        return self.value


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

    def start(self, method: str, arguments: Arguments, *, stored: bool = False) -> Pending:
        def run() -> list[Any]:
            each = zip(self.workers, for_workers(arguments, self.workers_per_share), strict=True)
            found = [getattr(worker, method)(*made(own)) for worker, own in each][:: self.workers_per_share]
            return [StoredHere(result) for result in found] if stored else found

        return Deferred(run)

    def put(self, value: Any) -> Stored:
        return StoredHere(value)

    def stream(self, method: str, next_items: NextItems) -> Stream:
        """Nothing runs beside the caller: the shares take turns."""
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(getattr(worker, method)())) for worker in self.workers]
            for stream in streams:
                next(stream)
            running = list(range(self.shares))
            while running:
                for share in list(running):
                    items, first = next_items(share), share * self.workers_per_share
                    if items is None:
                        running.remove(share)
                        continue
                    answers = [stream.send(items) for stream in streams[first : first + self.workers_per_share]]
                    yield share, answers[0]
