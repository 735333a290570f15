"""The roles that hold a model: policy, critic and reference, over any group of workers.

A batch is divided among the shares of a group here, and the results are merged here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rloom.algos.aggregate import Counts, episode_tokens
from rloom.algos.objectives import FIRST_UPDATE_METRICS, Metrics, Objective
from rloom.batch import Batch, TokenOutputs, TokenRecord, TrainBatch, token_indices
from rloom.engines.base import Update
from rloom.errors import TrainingError
from rloom.packing import share_rows
from rloom.runs.metrics import ModelWork
from rloom.runtime.group import Group, Pending
from rloom.training.learning_rate import LearningRateSchedule

Progress = Callable[[int, int], None]  # (done, total)


def no_progress(done: int, total: int) -> None:
    """For callers that show none."""


@dataclass(frozen=True)
class PendingOutputs:
    """The outputs of a scoring pass that may still be running."""

    batch: Batch
    rows: Sequence[Sequence[int]]  # of each share
    pending: Pending

    def wait(self) -> Tensor:
        """output_T of the whole batch."""
        merged_T = torch.zeros(len(self.batch.tokens_T))
        for rows, output_T in zip(self.rows, self.pending.wait(), strict=True):
            merged_T[token_indices(self.batch.length_N, torch.tensor(rows, dtype=torch.long))] = output_T
        return merged_T


@dataclass(frozen=True)
class Scorer:
    """A model's outputs without a gradient."""

    group: Group
    balance: bool = True
    reference: bool = False  # the policy's own workers, with their adapter switched off

    def start(self, batch: Batch) -> PendingOutputs:
        rows = share_rows(batch.length_N.tolist(), self.group.shares, balance=self.balance)
        method = "score_reference" if self.reference else "score"
        return PendingOutputs(batch, rows, self.group.start(method, [(batch.select(share),) for share in rows]))

    def score(self, batch: Batch) -> Tensor:
        return self.start(batch).wait()


@dataclass(frozen=True)
class RowShares:
    """The rows of a mini-batch that each share of a group has."""

    length_N: Tensor  # of the mini-batch
    rows: Sequence[Sequence[int]]

    def merged(self, outputs: Sequence[TokenOutputs | None]) -> TokenOutputs | None:
        """Outputs of the whole mini-batch, given those of each share. None: they were not recorded."""
        merged_2T = torch.zeros(2, int(self.length_N.sum()))
        for rows, found in zip(self.rows, outputs, strict=True):
            if found is None or found.entropy_T is None:
                return None
            index_T = token_indices(self.length_N, torch.tensor(rows, dtype=torch.long))
            merged_2T[:, index_T] = torch.stack([found.output_T, found.entropy_T])
        return TokenOutputs(*merged_2T)


@dataclass(frozen=True)
class MiniBatching:
    """How one batch becomes several updates."""

    prompts_per_update: int
    epochs: int
    shuffle: bool
    seed: int
    horizon: int  # longest answer allowed

    def mini_batches(self, batch: Batch, step: int) -> Iterator[Tensor]:
        """Rows of each update. The answers to one prompt stay together."""
        groups = batch.group_N.unique()
        for epoch in range(self.epochs):
            order = np.arange(len(groups))
            if self.shuffle:
                np.random.default_rng((self.seed, step, epoch)).shuffle(order)
            for first in range(0, len(groups), self.prompts_per_update):
                chosen = groups[torch.from_numpy(order[first : first + self.prompts_per_update])]
                yield torch.isin(batch.group_N, chosen).nonzero().squeeze(1)

    def updates(self, batch: Batch) -> int:
        return self.epochs * -(-len(batch.group_N.unique()) // self.prompts_per_update)


class Learner:
    """A model that is scored and trained: the policy, the critic."""

    def __init__(
        self,
        name: str,  # actor or critic: its folder in a checkpoint
        group: Group,
        *,
        objective: Objective,
        mini_batching: MiniBatching,
        schedule: LearningRateSchedule,
        balance: bool,
        max_nonfinite: int,
        prefix: str | None = None,  # of its metrics; None: its name
        remedy: str | None = None,  # of gradients that are not finite
        work: ModelWork | None = None,  # of its model, where it is known
    ) -> None:
        self.name = name
        self.group = group
        self.objective, self.mini_batching, self.schedule = objective, mini_batching, schedule
        self.balance = balance
        self.max_nonfinite = max_nonfinite
        self.work = work
        self.prefix = name if prefix is None else prefix
        self.remedy = remedy or f"Lower {name}'s optim.lr or grad_clip, or look at the rewards"
        self.nonfinite_in_a_row = 0
        self.updates = 0  # optimizer steps begun

    @property
    def scorer(self) -> Scorer:
        return Scorer(self.group, self.balance)

    def learn(
        self,
        batch: TrainBatch,
        step: int,
        progress: Progress = no_progress,
        record: TokenRecord | None = None,  # gets the outputs of each token, if the objective records them
    ) -> Metrics:
        """All optimizer steps of one batch; metrics are averaged over them, except those of the first step only."""
        learning_rate, total = self.schedule.at(step), self.mini_batching.updates(batch)
        gathered: dict[str, list[float]] = defaultdict(list)
        skipped = 0
        progress(0, total)
        for done, rows in enumerate(self.mini_batching.mini_batches(batch, step), start=1):
            shares = self.accumulate(batch.select(rows))
            update = self.apply(learning_rate, shares)
            self.watch(update)
            if record is not None and update.outputs is not None:
                record.put(token_indices(batch.length_N, rows), update.outputs, batch.old_logprobs_T)
            skipped += not update.applied
            if update.applied:
                for key, value in {**update.metrics, f"{self.prefix}/grad_norm": update.grad_norm}.items():
                    if done == 1 or key not in FIRST_UPDATE_METRICS:
                        gathered[key].append(value)
            progress(done, total)
        means = {key: sum(values) / len(values) for key, values in gathered.items()}
        return {**means, f"{self.prefix}/lr": learning_rate, f"{self.prefix}/nonfinite_updates": float(skipped)}

    def accumulate(self, mini: TrainBatch) -> "RowShares":
        """The gradient of one mini-batch, of which each worker computes a share."""
        mini = self.objective.prepare(mini)
        mini = replace(mini, episode_tokens_N=episode_tokens(mini))
        counts = Counts.of(mini, self.mini_batching.horizon)
        rows = share_rows(mini.length_N.tolist(), self.group.shares, balance=self.balance)
        self.group.each("forward_backward", [(mini.select(share), self.objective, counts) for share in rows])
        return RowShares(mini.length_N, rows)

    def apply(self, learning_rate: float, shares: "RowShares") -> Update:
        """An optimizer step on every worker. Their metrics are summands of the mini-batch's."""
        self.updates += 1
        updates: list[Update] = self.group.call("optim_step", learning_rate)
        parts = [update.metrics for update in updates]
        names = dict.fromkeys(name for part in parts for name in part)  # a worker without a share has none
        return replace(
            updates[0],
            metrics={name: sum(part.get(name, 0.0) for part in parts) for name in names},
            outputs=shares.merged([update.outputs for update in updates]),
        )

    def watch(self, update: Update) -> None:
        self.nonfinite_in_a_row = 0 if update.applied else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= self.max_nonfinite:
            raise TrainingError(
                f"{self.nonfinite_in_a_row} {self.name} updates in a row had a gradient that is not finite "
                f"(trainer.max_nonfinite_updates={self.max_nonfinite}); none was applied. "
                f"{self.remedy}"
            )

    def save(self, folder: Path, contents: frozenset[str]) -> None:
        (folder / self.name).mkdir(parents=True)
        self.group.call("save", folder / self.name, contents)

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        self.group.call("load", folder / self.name, contents)
