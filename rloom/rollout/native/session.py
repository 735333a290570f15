"""A session generates for requests of one kind of sampling: it opens with the first of them and ends with the last."""

from typing import NamedTuple, Protocol

from torch import Tensor

from rloom.rollout.base import Request


class Finished(NamedTuple):
    request: int
    tokens_L: Tensor
    logprobs_L: Tensor
    stopped: bool
    reused_tokens: int  # as in Completion
    experts_LMK: Tensor | None = None  # as in Completion


class Session(Protocol):
    @property
    def idle(self) -> bool:
        """No request waits or runs."""

    def fits(self, request: Request) -> bool:
        """Whether the request can join: its sampling, and the size of what is allocated."""

    def add(self, number: int, request: Request) -> None: ...

    @property
    def keeps_conversations(self) -> bool:
        """Caches wait for requests that continue them."""

    def end_conversation(self, conversation: int) -> None:
        """Release its cache."""

    def cancel(self, number: int) -> None:
        """Stop a request, and free its slot. Its conversation goes on."""

    def tokens_so_far(self, number: int) -> Tensor:
        """Of a running request; none if it waits."""

    def advance(self) -> list[Finished]:
        """Generate for a moment; what finished."""
