"""The data types with tensors: Trajectory -> Batch -> TrainBatch.

Names end with their dimensions:
    T  tokens of all samples, packed: concatenated without padding
    N  samples
    L  tokens of one sample
    M  layers of a mixture-of-experts model that have a router
    K  experts that a router chooses for a token

A quantity of token t (its log-prob, its advantage, the value of the state before it) is at index t. The first
token of a sample has no context: its log-prob and value are 0, and it is never in the mask.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rloom.transfer import send
from rloom.types import EpisodeSummary, Prompt, Score

TOKENS_AT_ONCE = 1 << 15  # of a statistic: what is computed of them stays in the CPU's cache


@dataclass(frozen=True)
class Turn:
    """Consecutive tokens that the policy generated: one answer.

    Example: of the tokens 4 to 10 the versions 6 and 7 generated three each -> Turn(4, 10, 7, earlier=((7, 6),)).
    """

    start: int
    stop: int
    version: int  # of the weights that generated it, or its last tokens
    # iff the answer was interrupted: (stop, version) of each run of tokens of one version, before the last run
    earlier: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_runs(cls, start: int, runs: Sequence[tuple[int, int]]) -> "Turn":
        """`runs`: (tokens, version), one after the other; neighbours may have one version, and a run no token."""
        stop, ends = start, list[tuple[int, int]]()
        for tokens, version in runs:
            if tokens:
                stop += tokens
                if ends and ends[-1][1] == version:
                    ends.pop()
                ends.append((stop, version))
        if not ends:  # an answer without a token
            return cls(start, start, runs[-1][1])
        return cls(start, stop, ends[-1][1], tuple(ends[:-1]))

    @property
    def runs(self) -> tuple["Turn", ...]:
        """The parts that one version each generated."""
        ends = (*self.earlier, (self.stop, self.version))
        starts = (self.start, *(stop for stop, _ in self.earlier))
        return tuple(Turn(start, stop, version) for start, (stop, version) in zip(starts, ends, strict=True))

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the runs, in the order of the tokens."""
        return (*(version for _, version in self.earlier), self.version)

    @property
    def oldest(self) -> int:
        """By it the staleness of an answer is counted."""
        return min(self.versions)

    @property
    def newest(self) -> int:
        return max(self.versions)

    def version_of(self, token: int) -> int:
        assert self.start <= token < self.stop
        return next((version for stop, version in self.earlier if token < stop), self.version)


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
    finished: bool  # False if it ended at a limit: of its length; of an episode, of turns, tokens or time
    score: Score
    experts_LMK: Tensor | None = None  # as in Batch
    text: str = ""  # the policy's tokens, decoded without special ones
    episode: EpisodeSummary | None = None  # iff the answer has several turns
    branch: int = 0  # an episode whose past was rewritten has several, from 0; each is a trajectory
    in_loss: bool = True  # False: its score counts for the answers that it is compared with, its tokens do not
    # (index of a turn's last token, the part of the score it gets); what turns before this branch got is at index 0
    turn_rewards: tuple[tuple[int, float], ...] = ()

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
    mask_T: Tensor  # bool, True for tokens that the policy generated
    rollout_logprobs_T: Tensor  # float32, from the rollout engine
    length_N: Tensor  # int64, tokens of each sample
    group_N: Tensor  # int64, equal for the answers to one prompt
    score_N: Tensor  # float32, 0 where the score failed
    valid_N: Tensor  # bool, False where the score failed
    # int16, iff routing is replayed: the experts that the rollout's routers chose when the token was the model's input.
    # -1: the rollout did not compute it (the last token of a sample), and the trainer's router chooses.
    experts_TMK: Tensor | None = field(default=None, kw_only=True)
    # int64, iff an episode has several branches: equal for those of one episode, which count once in all statistics
    episode_N: Tensor | None = field(default=None, kw_only=True)
    in_loss_N: Tensor | None = field(default=None, kw_only=True)  # bool, iff samples are scored and not in the loss
    turn_rewards_T: Tensor | None = field(default=None, kw_only=True)  # iff turns are rewarded; contained in score_N
    finished_N: Tensor | None = field(default=None, kw_only=True)  # bool, False where the answer ended at a limit
    episode_tokens_N: Tensor | None = field(default=None, kw_only=True)  # iff episode_N, in an update: see aggregate.py

    @classmethod
    def pack(cls, trajectories: Sequence[Trajectory], *, mask_truncated: bool = False) -> "Batch":
        """`mask_truncated`: answers that ended at a limit are scored and not in the loss."""
        return cls(
            tokens_T=torch.cat([t.tokens_L for t in trajectories]),
            mask_T=torch.cat([t.mask_L for t in trajectories]),
            rollout_logprobs_T=torch.cat([t.logprobs_L for t in trajectories]),
            length_N=torch.tensor([len(t.tokens_L) for t in trajectories]),
            group_N=torch.tensor([t.group for t in trajectories]),
            score_N=torch.tensor([t.score.value or 0.0 for t in trajectories]),
            valid_N=torch.tensor([t.score.ok for t in trajectories]),
            experts_TMK=pack_experts(trajectories),
            episode_N=pack_episodes(trajectories),
            in_loss_N=pack_in_loss(trajectories, mask_truncated),
            turn_rewards_T=pack_turn_rewards(trajectories),
            finished_N=torch.tensor([t.finished for t in trajectories]),
        )

    def __len__(self) -> int:
        return len(self.length_N)

    @property
    def sample_T(self) -> Tensor:
        """The index of each token's sample."""
        rows_N = torch.arange(len(self), device=self.length_N.device)
        return torch.repeat_interleave(rows_N, self.length_N, output_size=len(self.tokens_T))

    def at_tokens(self, value_N: Tensor) -> Tensor:
        """The value of each token's sample. On the host without an index of each token, which is eight bytes."""
        if not numpy_reads(value_N):
            return value_N[self.sample_T]
        return torch.from_numpy(np.repeat(value_N.numpy(), self.length_N.numpy()))

    def sums(self, value_T: Tensor, mask_T: Tensor, dtype: torch.dtype) -> Tensor:
        """Of each sample, the sum over its tokens in the mask, added one after the other.

        On the host a sample after the other: its values stay in the CPU's cache.
        """
        sums_N = torch.zeros(len(self), dtype=dtype, device=value_T.device)
        if not numpy_reads(value_T):
            return sums_N.index_add(0, self.sample_T, value_T.to(dtype).where(mask_T, 0))
        values, mask, sums = value_T.numpy(), mask_T.numpy(), sums_N.numpy()
        for row, (start, stop) in enumerate(pairwise(token_ends(self.length_N))):
            sums[row] += np.cumsum(values[start:stop][mask[start:stop]], dtype=sums.dtype)[-1:].sum()
        return sums_N

    def counts(self, mask_T: Tensor) -> Tensor:
        """int64: of each sample, its tokens in the mask."""
        mask = mask_T.cpu().numpy()
        counted = [np.count_nonzero(mask[start:stop]) for start, stop in pairwise(token_ends(self.length_N))]
        return torch.tensor(counted, dtype=torch.long, device=self.length_N.device)

    @property
    def episode_T(self) -> Tensor:
        """The index of each token's episode, from 0: that of its sample, unless an episode has several branches."""
        if self.episode_N is None:
            return self.sample_T
        _, member_N = self.episode_N.unique(return_inverse=True)
        episode_T: Tensor = member_N[self.sample_T]
        return episode_T

    @property
    def counted_N(self) -> Tensor:
        """bool, True for one sample of each episode."""
        if self.episode_N is None:
            return torch.ones_like(self.valid_N)
        counted_N = torch.zeros_like(self.valid_N)
        _, member_N = self.episode_N.unique(return_inverse=True)
        rows_N = torch.arange(len(self), device=member_N.device)
        first_E = rows_N.new_full((len(member_N),), len(self)).scatter_reduce(0, member_N, rows_N, "amin")
        counted_N[first_E[first_E < len(self)]] = True
        return counted_N

    @property
    def answer_length_N(self) -> Tensor:
        """Tokens from the first turn to the last, those of the environment between them too; 0 without a turn. The
        branches of an episode have that of the longest."""
        place_A = self.mask_T.nonzero().squeeze(1)  # A: generated tokens
        sample_A, none_N = self.sample_T[place_A], self.length_N.new_zeros(len(self))
        first_N = none_N.scatter_reduce(0, sample_A, place_A, "amin", include_self=False)
        last_N = (none_N - 1).scatter_reduce(0, sample_A, place_A, "amax", include_self=False)
        length_N = last_N - first_N + 1
        if self.episode_N is None:
            return length_N
        longest_E = none_N.scatter_reduce(0, self.episode_N, length_N, "amax")
        return longest_E[self.episode_N]

    @property
    def trained_N(self) -> Tensor:
        """bool, False for samples of which no token is in the loss."""
        return self.valid_N if self.in_loss_N is None else self.valid_N & self.in_loss_N

    @property
    def loss_mask_T(self) -> Tensor:
        """The tokens in the loss: generated by the policy, in a sample whose score did not fail."""
        return self.mask_T & self.at_tokens(self.trained_N)

    def loss_tokens(self, rows_N: Tensor) -> Tensor:
        """The number of tokens in the loss of each of these samples, as `loss_mask_T` has them."""
        mask, ends = self.mask_T.numpy(), token_ends(self.length_N)
        counts = [np.count_nonzero(mask[ends[row] : ends[row + 1]]) for row in rows_N.tolist()]
        return torch.tensor(counts, dtype=torch.long) * self.trained_N[rows_N]

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """These samples, in this order: used to shuffle, to shard, and for mini- and micro-batches."""
        rows_N = torch.as_tensor(rows, dtype=torch.long, device=self.length_N.device)
        ends, chosen = token_ends(self.length_N), rows_N.tolist()
        selected = {
            name: tensor[rows_N] if name.endswith("_N") else joined(tensor, ends, chosen)
            for name, tensor in self.columns.items()
        }
        return replace(self, **selected)

    @property
    def columns(self) -> dict[str, Tensor]:
        """By the names of the fields, without those that are None."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def view(self, rows: slice, tokens: slice) -> Self:
        """Consecutive samples and their tokens, as views of the same memory."""
        return replace(self, **{name: t[rows if name.endswith("_N") else tokens] for name, t in self.columns.items()})

    def without_experts(self) -> Self:
        """For the models whose routing is not replayed: the reference and the critic."""
        return replace(self, experts_TMK=None)

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: send(t, device) for name, t in self.columns.items()})


@dataclass(frozen=True)
class TrainBatch(Batch):
    """A batch with what the losses need."""

    advantages_T: Tensor
    old_logprobs_T: Tensor | None  # None: the update is on-policy, and the ratio is to the policy itself
    ref_logprobs_T: Tensor | None  # iff KL
    values_T: Tensor | None  # iff critic: its values before the update
    returns_T: Tensor | None  # iff critic
    rollout_weights_T: Tensor | None = None  # iff rollout correction by weights: factor of each token's policy loss
    keep_T: Tensor | None = None  # iff rollout correction by rejection: bool, False if rejected
    chosen_T: Tensor | None = None  # iff the policy loss selects tokens over the whole mini-batch: bool
    recorded_N: Tensor | None = None  # iff an update returns its outputs for some samples alone: bool

    @classmethod
    def of(
        cls,
        batch: Batch,
        found: "Advantages",
        *,
        old_logprobs_T: Tensor | None = None,
        ref_logprobs_T: Tensor | None = None,
        values_T: Tensor | None = None,
    ) -> "TrainBatch":
        return cls(
            **vars(batch),
            advantages_T=found.advantages_T,
            old_logprobs_T=old_logprobs_T,
            ref_logprobs_T=ref_logprobs_T,
            values_T=values_T,
            returns_T=found.returns_T if values_T is not None else None,
        )

    @property
    def loss_mask_T(self) -> Tensor:
        """The tokens in the loss: as in any batch, without those that rollout correction rejected."""
        mask_T = super().loss_mask_T
        return mask_T if self.keep_T is None else mask_T & self.keep_T

    def loss_tokens(self, rows_N: Tensor) -> Tensor:
        if self.keep_T is None:
            return super().loss_tokens(rows_N)
        return replace(self, mask_T=self.mask_T & self.keep_T, keep_T=None).loss_tokens(rows_N)

    def have_advantage(self, rows_N: Tensor) -> Tensor:
        """bool, for each of these samples: whether the advantage of a token in the loss is not 0."""
        return replace(self, mask_T=self.mask_T & (self.advantages_T != 0)).loss_tokens(rows_N) > 0


@dataclass(frozen=True)
class Advantages:
    advantages_T: Tensor
    returns_T: Tensor
    estimated_T: Tensor | None = (
        None  # bool, tokens with an estimate; the advantage of others is 0. None: the loss mask
    )


@dataclass(frozen=True)
class TokenOutputs:
    """A model's output for each token, differentiable; 0 outside the mask."""

    output_T: Tensor  # a policy: the log-prob; a critic: the value of the state before the token
    entropy_T: Tensor | None = None  # iff policy: of the distribution the token was sampled from
    kl_T: Tensor | None = None  # iff requested: KL to the reference over the whole vocabulary
    # iff routing is replayed: the share of the rollout's experts, for the token before, that the routers do not choose
    routing_mismatch_T: Tensor | None = None


@dataclass(frozen=True)
class TokenRecord:
    """What the policy computed for the tokens of the recorded samples, in the last update of a step that used them; not
    differentiable."""

    entropy_T: Tensor  # 0 where no update used the token
    ratio_T: Tensor  # its probability over that of the old policy; 1 if the update was on-policy
    places: Mapping[int, int]  # of each recorded sample among them, by its row in the batch
    ends: Sequence[int]  # of the recorded samples, by `token_ends`

    @classmethod
    def empty(cls, batch: TrainBatch) -> "TokenRecord":
        all_N = torch.arange(len(batch))
        rows_N = all_N if batch.recorded_N is None else all_N[batch.recorded_N]
        ends = token_ends(batch.length_N[rows_N])
        places = {row: place for place, row in enumerate(rows_N.tolist())}
        return cls(zeros_T(ends[-1]), torch.ones(ends[-1]), places, ends)

    def put(self, ends: Sequence[int], rows: Sequence[int], outputs: TokenOutputs, batch: TrainBatch) -> None:
        """`outputs`: of those of the samples `rows` that are recorded, in that order. `ends`: of all samples."""
        assert outputs.entropy_T is not None  # a policy's
        recorded = [row for row in rows if row in self.places]
        places = [self.places[row] for row in recorded]
        place(self.entropy_T, self.ends, places, outputs.entropy_T)
        if batch.old_logprobs_T is None:
            return
        own_ends = token_ends(torch.tensor([ends[row + 1] - ends[row] for row in recorded]))
        for row, own, (first, stop) in zip(recorded, places, pairwise(own_ends), strict=True):
            old_T = batch.old_logprobs_T[ends[row] : ends[row + 1]]
            ratio_T = self.ratio_T[self.ends[own] : self.ends[own + 1]]
            torch.sub(outputs.output_T[first:stop], old_T, out=ratio_T).exp_()


def sum_by_episode(value_N: Tensor, batch: Batch) -> Tensor:
    """For each sample, the sum over the branches of its episode."""
    if batch.episode_N is None:
        return value_N
    _, member_N = batch.episode_N.unique(return_inverse=True)
    return value_N.new_zeros(len(batch)).index_add(0, member_N, value_N)[member_N]


def token_scores(batch: Batch) -> Tensor:
    """The score at the last generated token of each sample; what turns have got of it is at the last token of each.

    What turns before a branch have got is at a token that was not generated, and not in the rewards of the branch.
    """
    mask, rewards_T = batch.mask_T.cpu().numpy(), batch.score_N.new_zeros(len(batch.mask_T))
    ends = [*pairwise(token_ends(batch.length_N))]
    rows = [row for row, (start, stop) in enumerate(ends) if mask[start:stop].any()]
    last = [ends[row][1] - 1 - int(mask[slice(*ends[row])][::-1].argmax()) for row in rows]
    rewards_T[last] = batch.score_N[rows]
    if batch.turn_rewards_T is not None:
        placed_N = batch.turn_rewards_T.new_zeros(len(batch)).index_add(0, batch.sample_T, batch.turn_rewards_T)
        rewards_T[last] -= placed_N[rows]
        rewards_T += batch.turn_rewards_T.where(batch.mask_T, 0)
    return rewards_T


def sample_returns(batch: Batch, rewards_T: Tensor) -> Tensor:
    """The sum of each sample's rewards. Branches of one episode share it: the score once, and the KL of all tokens.

    In float64, with the score itself where it is divided over turns: the mean of equal returns equals them exactly.
    """
    divided = batch.episode_N is not None or batch.turn_rewards_T is not None
    further_T = rewards_T.double() - token_scores(batch).double() if divided else rewards_T
    further_N = batch.sums(further_T, batch.mask_T, torch.float64)
    return batch.score_N.double() + sum_by_episode(further_N, batch) if divided else further_N


def answers_of(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """One trajectory of each answer: of an episode with several branches, the first."""
    return [trajectory for trajectory in trajectories if trajectory.branch == 0]


def pack_experts(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """None if no trajectory has experts; -1 for the tokens of one that has none."""
    shapes = {t.experts_LMK.shape[1:] for t in trajectories if t.experts_LMK is not None}
    if not shapes:
        return None
    (shape,) = shapes
    return torch.cat(
        [
            torch.full((len(t.tokens_L), *shape), -1, dtype=torch.int16) if t.experts_LMK is None else t.experts_LMK
            for t in trajectories
        ]
    )


def pack_episodes(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """None if every episode is one trajectory. The branches of an episode follow each other."""
    first_N = torch.tensor([t.branch == 0 for t in trajectories])
    return None if first_N.all() else first_N.cumsum(0) - 1


def pack_in_loss(trajectories: Sequence[Trajectory], mask_truncated: bool) -> Tensor | None:
    """None if all are in the loss."""
    in_loss_N = torch.tensor([t.in_loss and (t.finished or not mask_truncated) for t in trajectories])
    return None if in_loss_N.all() else in_loss_N


def pack_turn_rewards(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """None if no turn has a reward of its own."""
    if not any(t.turn_rewards for t in trajectories):
        return None
    rewards = [torch.zeros(len(t.tokens_L)) for t in trajectories]
    for reward_L, trajectory in zip(rewards, trajectories, strict=True):
        for place, value in trajectory.turn_rewards:
            reward_L[place] += value
    return torch.cat(rewards)


def zeros_T(tokens: int) -> Tensor:
    """On the host. Torch writes the zeros; numpy takes memory that Linux has set to 0, in huge pages if it can."""
    return torch.from_numpy(np.zeros(tokens, np.float32))


def masked_blocks(mask_T: Tensor, *values_T: Tensor) -> Iterator[list[Tensor]]:
    """In float64, the values in the mask among TOKENS_AT_ONCE tokens, then among the next. On the host."""
    for start in range(0, len(mask_T), TOKENS_AT_ONCE):
        block = slice(start, start + TOKENS_AT_ONCE)
        mask = mask_T[block].numpy()
        if mask.any():
            yield [torch.from_numpy(value_T[block].numpy()[mask]).double() for value_T in values_T]


@dataclass
class TokenMoments:
    """Of numbers that arrive in blocks. Of one block they are torch's, bit for bit."""

    correction: int | None = None  # as in torch.var; None: no variance
    count: int = 0
    sums: list[tuple[int, float, float]] = field(default_factory=list)  # of each block: count, sum, variance
    largest: float = -math.inf
    smallest: float = math.inf

    def add(self, block: Tensor) -> None:
        smallest, largest = (float(end) for end in block.aminmax())
        self.smallest, self.largest = min(self.smallest, smallest), max(self.largest, largest)
        few = self.correction is None or len(block) <= self.correction
        variance = 0.0 if few else float(block.var(correction=self.correction))
        self.sums.append((len(block), float(block.sum()), variance))
        self.count += len(block)

    @property
    def mean(self) -> float:
        return sum(total for _, total, _ in self.sums) / self.count

    @property
    def variance(self) -> float:
        """0 of one number."""
        assert self.correction is not None
        mean, divisor = self.mean, max(self.count - self.correction, 1)
        if self.smallest == self.largest:
            return 0.0
        within = (variance * ((count - self.correction) / divisor) for count, _, variance in self.sums)
        between = (count * (total / count - mean) ** 2 / divisor for count, total, _ in self.sums)
        return sum(within) + sum(between)


def numpy_reads(value: Tensor) -> bool:
    """Numpy has no bfloat16 and no gradients."""
    return value.device.type == "cpu" and value.dtype is not torch.bfloat16 and not value.requires_grad


def token_ends(length_N: Tensor) -> list[int]:
    """0, then the index behind the last token of each sample."""
    return [0, *accumulate(length_N.tolist())]


def joined(value_T: Tensor, ends: Sequence[int], rows: Sequence[int]) -> Tensor:
    """The values of the samples `rows`, in that order. `ends`: of the samples in `value_T`, by `token_ends`.

    One copy for each sample: an index of each token would take ten times as long.
    """
    return torch.cat([value_T[ends[row] : ends[row + 1]] for row in rows]) if rows else value_T[:0]


def place(value_T: Tensor, ends: Sequence[int], rows: Sequence[int], part_T: Tensor) -> None:
    """The reverse of `joined`: writes `part_T` to where the samples `rows` are in `value_T`."""
    first = 0
    for row in rows:
        stop = first + ends[row + 1] - ends[row]
        value_T[ends[row] : ends[row + 1]] = part_T[first:stop]
        first = stop


def token_indices(length_N: Tensor, rows_N: Tensor) -> Tensor:
    """The indices of the tokens of the samples `rows_N`, in that order, among the packed tokens."""
    start_N = torch.cumsum(length_N, 0) - length_N
    selected_N = length_N[rows_N]
    first_N = torch.cumsum(selected_N, 0) - selected_N
    shift_T = torch.repeat_interleave(start_N[rows_N] - first_N, selected_N)
    return torch.arange(int(selected_N.sum()), device=length_N.device) + shift_T
