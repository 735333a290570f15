"""Workers that torchrun has started. Rank 0 runs the loop; the other ranks wait for its calls and answer them.

A rank that fails ends, and torchrun then ends the others.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rloom.errors import RloomError, WorkerError
from rloom.runtime.group import (
    Arguments,
    Deferred,
    Group,
    NextItems,
    Pending,
    Stored,
    StoredHere,
    Stream,
    for_workers,
    made,
)

NEXT_CALL = timedelta(days=7)  # a rank may wait for its next call as long as this


class HasRoles(Protocol):
    @property
    def roles(self) -> Any:
        """Objects by name."""


def this_rank() -> int:
    return int(os.environ["RANK"])


def master_address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


class TorchrunRanks:
    """Sends a call to every rank. All ranks create it together, after they have joined their process group."""

    def __init__(self, worker: HasRoles) -> None:
        self.worker = worker
        # a group of its own: its timeout is longer than that of the engine's collectives
        self.group = dist.new_group(backend="gloo", timeout=NEXT_CALL)

    def call(self, calls: Sequence[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        """(role, method, arguments) for each rank. Rank 0 runs its own call beside the others."""
        own = self.scatter(calls)
        try:
            result = self.run(own)
        except RloomError as error:
            error.worker = "rank 0"  # the other ranks may hang in a collective: nothing more is sent to them
            raise
        except Exception as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            raise WorkerError(f"rank 0 failed: {type(error).__name__}: {error}", out_of_memory=out_of_memory) from error
        results: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(result, results, group=self.group)
        return results

    def serve(self) -> None:
        """On the other ranks: answer calls until rank 0 stops."""
        while (call := self.scatter(None)) is not None:
            dist.gather_object(self.run(call), group=self.group)

    def stop(self) -> None:
        self.scatter([None] * dist.get_world_size())

    def scatter(self, calls: Sequence[Any] | None) -> Any:
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if calls is None else list(calls), group=self.group)
        return received[0]

    def run(self, call: tuple[str, str, tuple[Any, ...]]) -> Any:
        role, method, arguments = call
        return getattr(self.worker.roles[role], method)(*made(arguments))


class RankGroup(Group):
    def __init__(self, ranks: TorchrunRanks, role: str, *, workers_per_share: int = 1) -> None:
        self.ranks, self.role, self.workers_per_share = ranks, role, workers_per_share

    @property
    def shares(self) -> int:
        return dist.get_world_size() // self.workers_per_share

    def put(self, value: Any) -> Stored:
        """It goes with each call that reads it: ranks may be on several machines, and SFT has one call a step."""
        return StoredHere(value)

    def start(self, method: str, arguments: Arguments, *, stored: bool = False) -> Pending:
        assert not stored  # SFT reads no token's result
        calls = [(self.role, method, own) for own in for_workers(arguments, self.workers_per_share)]
        return Deferred(lambda: self.ranks.call(calls)[:: self.workers_per_share])

    def stream(self, method: str, next_items: NextItems) -> Stream:
        raise NotImplementedError("torchrun's ranks do not generate")
