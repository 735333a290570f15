"""The rollout role: prompts in, completions out, as they finish."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to draw the next token. `temperature=0` is greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # run to the length limit whatever is written


@dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]
    seed: int  # decides this answer, whatever else is in the batch (hf: that of a batch's first decides them all)
    max_new_tokens: int | None = None  # a limit of its own, below the sampling's; 1 or more

    def limit(self, sampling: Sampling) -> int:
        most = sampling.max_new_tokens
        return most if self.max_new_tokens is None else min(self.max_new_tokens, most)


@dataclass(frozen=True)
class Completion:
    """What was written, the stop token included.

    The log-prob is that of the token under the whole distribution at the sampling temperature, before top-k
    and top-p cut it: the number the trainer computes for the same token.
    """

    tokens_L: Tensor  # int64
    logprobs_L: Tensor  # float32
    finished: bool  # it wrote a stop token


class WeightOwner(Protocol):
    """The training engine whose weights an in-process rollout borrows."""

    @property
    def device(self) -> torch.device: ...

    def on_device(self) -> AbstractContextManager[Any]:
        """Bring offloaded weights to the device for as long as it lasts."""


class Rollout(Protocol):
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        """Yields (index of the request, completion) in the order in which they finish."""

    def load_weights(self) -> None:
        """Make the actor's newest weights the ones that generate."""

    def sleep(self) -> None:
        """Give memory back before training."""

    def wake(self) -> None: ...
