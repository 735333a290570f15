"""The roles that hold a model: what the loop asks of policy, critic and reference, over any group of workers.

Sharding and merging are here, as ordinary code.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import Metrics, Objective
from rloom.batch import Batch, TrainBatch, token_indices
from rloom.engines.base import Update
from rloom.errors import TrainingError
from rloom.packing import share_rows
from rloom.runtime.group import Group
from rloom.trainer.learning_rate import LearningRateSchedule

Progress = Callable[[int, int], None]  # (done, total)


def each_share(group: Group, method: str, arguments: Sequence[tuple[Any, ...]], sequence_ranks: int) -> list[Any]:
    """Neighbours that share sequences get the same share of a batch and find the same: the first answers for them."""
    answers = group.each(method, [one for one in arguments for _ in range(sequence_ranks)])
    return answers[::sequence_ranks]


@dataclass(frozen=True)
class Scorer:
    """A model that is only asked: the reference."""

    group: Group
    balance: bool = True
    reference: bool = False  # ask the policy's own workers, with their adapter switched off
    sequence_ranks: int = 1  # workers that share a sequence

    def score(self, batch: Batch) -> Tensor:
        shares = share_rows(batch.length_N.tolist(), self.group.size // self.sequence_ranks, balance=self.balance)
        method = "score_reference" if self.reference else "score"
        outputs = each_share(self.group, method, [(batch.select(rows),) for rows in shares], self.sequence_ranks)
        merged_T = torch.zeros(len(batch.tokens_T))
        for rows, output_T in zip(shares, outputs, strict=True):
            merged_T[token_indices(batch.length_N, torch.tensor(rows, dtype=torch.long))] = output_T
        return merged_T


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
    """A model that is asked and taught: the policy, the critic."""

    def __init__(
        self,
        name: str,  # actor or critic: its folder in a checkpoint and its prefix in the metrics
        group: Group,
        *,
        objective: Objective,
        mini_batching: MiniBatching,
        schedule: LearningRateSchedule,
        balance: bool,
        max_nonfinite: int,
        parameters: int = 0,  # of its model, for the share of a device's peak that an update reaches
        sequence_ranks: int = 1,  # workers that share a sequence
    ) -> None:
        self.name = name
        self.group = group
        self.objective, self.mini_batching, self.schedule = objective, mini_batching, schedule
        self.balance = balance
        self.max_nonfinite = max_nonfinite
        self.parameters = parameters
        self.sequence_ranks = sequence_ranks
        self.nonfinite_in_a_row = 0
        self.updates = 0  # optimizer steps begun

    def score(self, batch: Batch) -> Tensor:
        return Scorer(self.group, self.balance, sequence_ranks=self.sequence_ranks).score(batch)

    def learn(self, batch: TrainBatch, step: int, progress: Progress) -> Metrics:
        """One pass of the update rule over the batch; metrics averaged over its updates."""
        learning_rate, total = self.schedule.at(step), self.mini_batching.updates(batch)
        gathered: dict[str, list[float]] = defaultdict(list)
        skipped = 0
        for done, rows in enumerate(self.mini_batching.mini_batches(batch, step), start=1):
            self.accumulate(batch.select(rows))
            update = self.apply(learning_rate)
            self.watch(update)
            skipped += not update.applied
            if update.applied:
                for key, value in {**update.metrics, f"{self.name}/grad_norm": update.grad_norm}.items():
                    gathered[key].append(value)
            progress(done, total)
        means = {key: sum(values) / len(values) for key, values in gathered.items()}
        return {**means, f"{self.name}/lr": learning_rate, f"{self.name}/nonfinite_updates": float(skipped)}

    def accumulate(self, mini: TrainBatch) -> None:
        """The gradient of one mini-batch, gathered over workers that each hold a share of it."""
        mini = self.objective.prepare(mini)
        counts = Counts.of(mini, self.mini_batching.horizon)
        shares = share_rows(mini.length_N.tolist(), self.group.size // self.sequence_ranks, balance=self.balance)
        arguments = [(mini.select(rows), self.objective, counts) for rows in shares]
        each_share(self.group, "forward_backward", arguments, self.sequence_ranks)

    def apply(self, learning_rate: float) -> Update:
        """The gathered gradient, on every worker; their metrics are shares of the mini-batch's."""
        self.updates += 1
        arguments = [(learning_rate,)] * (self.group.size // self.sequence_ranks)
        updates: list[Update] = each_share(self.group, "optim_step", arguments, self.sequence_ranks)
        parts = [update.metrics for update in updates]
        names = dict.fromkeys(name for part in parts for name in part)  # a worker without a share has none
        return replace(updates[0], metrics={name: sum(part.get(name, 0.0) for part in parts) for name in names})

    def watch(self, update: Update) -> None:
        self.nonfinite_in_a_row = 0 if update.applied else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= self.max_nonfinite:
            raise TrainingError(
                f"{self.nonfinite_in_a_row} {self.name} updates in a row had a gradient that is not finite "
                f"(trainer.max_nonfinite_updates={self.max_nonfinite}); none was applied. "
                f"Lower {self.name}'s optim.lr or grad_clip, or look at the rewards"
            )

    def save(self, folder: Path, contents: frozenset[str]) -> None:
        (folder / self.name).mkdir(parents=True)
        self.group.each("save", [(folder / self.name, contents)] * self.group.size)

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        self.group.each("load", [(folder / self.name, contents)] * self.group.size)
