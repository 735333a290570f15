"""A session generates for requests of one kind of sampling: it opens with the first of them and ends with the last."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rloom.rollout.base import Request


class Progress(NamedTuple):
    """The tokens of an interrupted or preempted answer, which it keeps, and their log-probs. On the host."""

    tokens_L: Tensor
    logprobs_L: Tensor

    @classmethod
    def of(cls, request: Request) -> "Progress | None":
        """None: no token of the answer was sampled yet."""
        begun = request.begun
        if begun is None or not begun.tokens:
            return None
        return cls(torch.tensor(begun.tokens), torch.tensor(begun.logprobs, dtype=torch.float32))


class Finished(NamedTuple):
    request: int
    tokens_L: Tensor
    logprobs_L: Tensor
    stopped: bool
    reused_tokens: int  # as in Completion
    experts_LMK: Tensor | None = None  # as in Completion
    interrupted: bool = False  # as in Completion

    @classmethod
    def waiting(cls, request: int, progress: Progress | None) -> "Finished":
        """A request that is interrupted while it waits."""
        if progress is None:
            progress = Progress(torch.empty(0, dtype=torch.long), torch.empty(0))
        return cls(request, *progress, stopped=False, reused_tokens=0, interrupted=True)


class Session(Protocol):
    @property
    def idle(self) -> bool:
        """No request waits or runs."""

    def fits(self, request: Request) -> bool:
        """Whether the request can join: its sampling, if others wait or run, and the size of what is allocated."""

    def add(self, number: int, request: Request) -> None: ...

    @property
    def keeps_conversations(self) -> bool:
        """Caches wait for requests that continue them."""

    def end_conversation(self, conversation: int) -> None:
        """Release its cache, or that of the interrupted answer with this number."""

    def weights_changed(self) -> None:
        """While it is idle. Only what is kept of older weights is used, by requests that continue it."""

    def cancel(self, *numbers: int) -> None:
        """Stop requests, and free their slots. Their conversations go on."""

    def interrupt(self, numbers: Sequence[int]) -> list[Finished]:
        """Stop requests that wait or run. Returns what each has, in this order; some may have finished.

        The caches of requests with an `answer` are kept.
        """

    def tokens_so_far(self, number: int) -> Tensor:
        """Of a running request; none if it waits."""

    def advance(self) -> list[Finished]:
        """Generate for a moment; what finished."""
