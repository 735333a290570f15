"""A rollout engine without a model, which finishes requests as it is told. Imported by worker processes."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rloom.rollout.base import Completion, Request, Rollout


class StubRollout(Rollout):
    """Finishes the oldest request in each poll: its answer is the seed, the version of its weights this worker."""

    def __init__(
        self, number: int, max_unfinished: int | None, waits_for: Path | None = None, fails_after: int | None = None
    ) -> None:
        """`waits_for`: it finishes nothing before this file exists. `fails_after`: it raises after so many answers."""
        self.number, self.limit, self.waits_for, self.fails_after = number, max_unfinished, waits_for, fails_after
        self.roles = {"rollout": self}
        self.submitted: list[int] = []  # seeds
        self.interrupted: list[int] = []  # seeds
        self.waiting: dict[int, Request] = {}
        self.finished = 0

    def max_unfinished(self) -> int | None:
        return self.limit

    def submit(self, request: Request) -> int:
        self.submitted.append(request.seed)
        self.waiting[len(self.submitted)] = request
        return len(self.submitted)

    def poll(self) -> list[Completion]:
        if self.finished == self.fails_after:
            raise RuntimeError("no such token")
        if not self.waiting or (self.waits_for is not None and not self.waits_for.exists()):
            return []
        self.finished += 1
        number = next(iter(self.waiting))
        seed = self.waiting.pop(number).seed
        return [Completion(number, torch.tensor([seed]), torch.tensor([-1.0]), finished=True, version=self.number)]

    def cancel(self, request: int) -> None:
        del self.waiting[request]

    def interrupt(self, request: int) -> Completion:
        """As far as it is: one token more than it began with."""
        asked = self.waiting.pop(request)
        self.interrupted.append(asked.seed)
        one = Completion(
            request, torch.tensor([asked.seed]), torch.tensor([-1.0]), False, self.number, interrupted=True
        )
        return one.behind(asked.begun)

    def interrupted_seeds(self) -> Sequence[int]:
        return self.interrupted

    def seeds(self) -> Sequence[int]:
        return self.submitted

    def unfinished(self) -> int:
        return len(self.waiting)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...
