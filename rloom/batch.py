"""The nouns made of tensors: Trajectory -> Batch -> TrainBatch.

Shapes live in names:
    T  tokens of all samples, laid end to end, no padding
    N  samples
    L  tokens of one sample

A quantity of token t (its log-prob, its advantage, the value of the state before it) stands at t's own
place. The first token of a sample has no history: its log-prob and value are 0 and it is never in the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from rloom.transfer import send
from rloom.types import Prompt, Score


@dataclass(frozen=True)
class Turn:
    """Consecutive tokens that the policy generated."""

    start: int
    stop: int
    version: int  # of the weights that generated it


@dataclass(frozen=True)
class Trajectory:
    """One episode: the prompt, then turns of the policy with, between them, tokens of its environment.

    Example: prompt [5, 6], answer [7, 8] -> tokens_L [5, 6, 7, 8], one turn from 2 to 4, mask_L [0, 0, 1, 1].
    """

    prompt: Prompt
    group: int  # equal for the trajectories of one prompt, which estimators compare
    tokens_L: Tensor  # int64
    logprobs_L: Tensor  # float32, from the rollout engine; 0 outside the turns
    turns: tuple[Turn, ...]
    finished: bool  # False if it reached the length limit
    score: Score

    @property
    def mask_L(self) -> Tensor:
        """bool, True where the policy generated the token."""
        mask_L = torch.zeros(len(self.tokens_L), dtype=torch.bool)
        for turn in self.turns:
            mask_L[turn.start : turn.stop] = True
        return mask_L

    @property
    def answer_tokens(self) -> list[int]:
        tokens: list[int] = self.tokens_L[self.mask_L].tolist()
        return tokens


@dataclass(frozen=True)
class Batch:
    """Scored trajectories, packed."""

    tokens_T: Tensor  # int64
    mask_T: Tensor  # bool, True where the policy wrote the token
    rollout_logprobs_T: Tensor  # float32, from the rollout engine
    length_N: Tensor  # int64, tokens of each sample
    group_N: Tensor  # int64, equal for the answers to one prompt
    score_N: Tensor  # float32, 0 where the score failed
    valid_N: Tensor  # bool, False where the score failed

    @classmethod
    def pack(cls, trajectories: Sequence[Trajectory]) -> "Batch":
        return cls(
            tokens_T=torch.cat([t.tokens_L for t in trajectories]),
            mask_T=torch.cat([t.mask_L for t in trajectories]),
            rollout_logprobs_T=torch.cat([t.logprobs_L for t in trajectories]),
            length_N=torch.tensor([len(t.tokens_L) for t in trajectories]),
            group_N=torch.tensor([t.group for t in trajectories]),
            score_N=torch.tensor([t.score.value or 0.0 for t in trajectories]),
            valid_N=torch.tensor([t.score.ok for t in trajectories]),
        )

    def __len__(self) -> int:
        return len(self.length_N)

    @property
    def sample_T(self) -> Tensor:
        """Which sample each token belongs to."""
        rows_N = torch.arange(len(self), device=self.length_N.device)
        return torch.repeat_interleave(rows_N, self.length_N, output_size=len(self.tokens_T))

    @property
    def loss_mask_T(self) -> Tensor:
        """The tokens that teach: written by the policy, in a sample whose score did not fail."""
        return self.mask_T & self.valid_N[self.sample_T]

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """These samples, in this order: shuffle, mini-batch, shard and balance are all this."""
        rows_N = torch.as_tensor(rows, dtype=torch.long, device=self.length_N.device)
        place_T = token_places(self.length_N, rows_N)
        picked = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                picked[field.name] = tensor[rows_N if field.name.endswith("_N") else place_T]
        return replace(self, **picked)

    def view(self, rows: slice, tokens: slice) -> Self:
        """Neighbouring samples and their tokens, in the same memory."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        cut = {name: t[rows if name.endswith("_N") else tokens] for name, t in parts.items() if t is not None}
        return replace(self, **cut)

    def to(self, device: torch.device) -> Self:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: send(t, device) for name, t in moved.items() if t is not None})


@dataclass(frozen=True)
class TrainBatch(Batch):
    """A batch that knows what to learn."""

    advantages_T: Tensor
    old_logprobs_T: Tensor | None  # None: the update is exactly on-policy, the ratio's base is the policy itself
    ref_logprobs_T: Tensor | None  # iff KL
    values_T: Tensor | None  # iff critic: its values before the update
    returns_T: Tensor | None  # iff critic
    rollout_weights_T: Tensor | None = None  # iff rollout correction weighs: factor of each token's policy loss
    keep_T: Tensor | None = None  # iff rollout correction rejects: bool, False where it did
    chosen_T: Tensor | None = None  # iff the policy loss chooses tokens over the whole mini-batch: bool

    @property
    def loss_mask_T(self) -> Tensor:
        """The tokens that teach: as in any batch, less those that rollout correction rejected."""
        mask_T = super().loss_mask_T
        return mask_T if self.keep_T is None else mask_T & self.keep_T


@dataclass(frozen=True)
class Advantages:
    advantages_T: Tensor
    returns_T: Tensor


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says of each token, with its gradient; 0 outside the mask."""

    output_T: Tensor  # a policy: the log-prob; a critic: the value of the state before the token
    entropy_T: Tensor | None = None  # iff policy: of the distribution the token was drawn from
    kl_T: Tensor | None = None  # iff asked for: KL to the reference over the whole vocabulary


def token_places(length_N: Tensor, rows_N: Tensor) -> Tensor:
    """The places, in the packed tokens, of the samples `rows_N` in that order."""
    start_N = torch.cumsum(length_N, 0) - length_N
    picked_N = length_N[rows_N]
    first_N = torch.cumsum(picked_N, 0) - picked_N
    shift_T = torch.repeat_interleave(start_N[rows_N] - first_N, picked_N)
    return torch.arange(int(picked_N.sum()), device=length_N.device) + shift_T
