"""The roles that hold a model: policy, critic and reference, over any group of workers.

A batch is divided among the shares of a group here, and the results are merged here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rloom.algos.aggregate import Counts, episode_tokens
from rloom.algos.objectives import FIRST_UPDATE_METRICS, Metrics, Objective
from rloom.batch import Batch, TokenRecord, TrainBatch, joined, place, token_ends, zeros_T
from rloom.engines.base import Update
from rloom.errors import TrainingError
from rloom.packing import share_rows
from rloom.runs.metrics import ModelWork
from rloom.runtime.group import Group, Pending
from rloom.training.batch_store import BatchStore, Rows
from rloom.training.learning_rate import LearningRateSchedule

Progress = Callable[[int, int], None]  # (done, total)


def no_progress(done: int, total: int) -> None:
    """For callers that show none."""


@dataclass(frozen=True)
class PendingOutputs:
    """The outputs of a scoring pass that may still be running."""

    store: BatchStore  # the workers read it
    rows: Rows
    pending: Pending

    def wait(self) -> Tensor:
        """output_T of the whole batch."""
        merged_T, stored = zeros_T(self.store.ends[-1]), self.pending.wait()
        for rows, output in zip(self.rows, stored, strict=True):
            place(merged_T, self.store.ends, rows, output.get())
        if self.rows is self.store.pieces:
            self.store.outputs.append((merged_T, stored))
        return merged_T


@dataclass(frozen=True)
class Scorer:
    """A model's outputs without a gradient."""

    group: Group
    balance: bool = True
    reference: bool = False  # the policy's own workers, with their adapter switched off
    work: ModelWork | None = None  # of the model, which shares are balanced by; None: by tokens
    equal_rows: bool = False  # micro-batches are a number of rows: with more rows, a share needs more passes

    def divided(self, length_N: Tensor) -> list[list[int]]:
        """Rows of each share, given the length of each row."""
        loads: Tensor = length_N if self.work is None else self.work.update_flops(length_N)
        return share_rows(loads.tolist(), self.group.shares, balance=self.balance, equal_rows=self.equal_rows)

    def start(self, batch: Batch, store: BatchStore | None = None) -> PendingOutputs:
        """`store`: of the step, which other passes use as well. Its pieces are the shares, if there are as many."""
        usable = store is not None and len(store.pieces) == self.group.shares
        rows = store.pieces if store is not None and usable else self.divided(batch.length_N)
        store = store or BatchStore(self.group, batch.length_N, rows)
        method = "score_reference" if self.reference else "score"
        named = [(one,) for one in store.rows(batch, rows)]
        return PendingOutputs(store, rows, self.group.start(method, named, stored=True))

    def score(self, batch: Batch) -> Tensor:
        return self.start(batch).wait()


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
        equal_rows: bool = False,
    ) -> None:
        self.name = name
        self.group = group
        self.scorer = Scorer(group, balance, work=work, equal_rows=equal_rows)
        self.objective, self.mini_batching, self.schedule = objective, mini_batching, schedule
        self.max_nonfinite = max_nonfinite
        self.work = work
        self.prefix = name if prefix is None else prefix
        self.remedy = remedy or f"Lower {name}'s optim.lr or grad_clip, or look at the rewards"
        self.nonfinite_in_a_row = 0
        self.updates = 0  # optimizer steps begun

    def store(self, batch: Batch, step: int) -> BatchStore:
        """For all passes of a step over the batch. A piece has what its share gets in the updates of the first epoch:
        a worker reads one piece, unless later epochs shuffle."""
        pieces: list[list[int]] = [[] for _ in range(self.group.shares)]
        one_epoch = replace(self.mini_batching, epochs=1)
        for rows in one_epoch.mini_batches(batch, step) if len(pieces) > 1 else [torch.arange(len(batch))]:
            for piece, share in zip(pieces, self.scorer.divided(batch.length_N[rows]), strict=True):
                piece += rows[share].tolist()
        return BatchStore(self.group, batch.length_N, [sorted(piece) for piece in pieces])

    def learn(
        self,
        batch: TrainBatch,
        step: int,
        progress: Progress = no_progress,
        record: TokenRecord | None = None,  # gets the outputs of each token that is recorded, if any is
        store: BatchStore | None = None,  # of the step, if other passes use it as well
    ) -> Metrics:
        """All optimizer steps of one batch; metrics are averaged over them, except those of the first step only."""
        batch = replace(batch, episode_tokens_N=episode_tokens(batch))
        store = store or self.store(batch, step)
        learning_rate, total = self.schedule.at(step), self.mini_batching.updates(batch)
        gathered: dict[str, list[float]] = defaultdict(list)
        skipped = 0
        progress(0, total)
        for done, rows in enumerate(self.mini_batching.mini_batches(batch, step), start=1):
            shares = self.accumulate(batch, rows, store)
            update = self.apply(learning_rate, batch, shares, record)
            self.watch(update)
            skipped += not update.applied
            if update.applied:
                for key, value in {**update.metrics, f"{self.prefix}/grad_norm": update.grad_norm}.items():
                    if done == 1 or key not in FIRST_UPDATE_METRICS:
                        gathered[key].append(value)
            progress(done, total)
        means = {key: sum(values) / len(values) for key, values in gathered.items()}
        if self.objective.skips_zero_advantages:
            means[f"{self.prefix}/trained_answers"] = self.share_with_advantage(batch)
        return {**means, f"{self.prefix}/lr": learning_rate, f"{self.prefix}/nonfinite_updates": float(skipped)}

    def accumulate(self, batch: TrainBatch, rows: Tensor | None = None, store: BatchStore | None = None) -> Rows:
        """The gradient of the mini-batch `rows`; None: of the whole batch. Returns the rows of each share."""
        rows = torch.arange(len(batch)) if rows is None else rows
        used = self.with_gradient(batch, rows)
        counts = self.counts(batch, rows)
        if len(used) < len(rows):
            counts = replace(counts, measured=self.counts(batch, rows[used]))
        divided = [used[share].tolist() for share in self.scorer.divided(batch.length_N[rows[used]])]
        shares = [rows[share].tolist() for share in divided]
        store = store or BatchStore(self.group, batch.length_N, shares)
        named = store.rows(batch, shares, self.chosen(batch, rows, divided))
        self.group.each("forward_backward", [(one, self.objective, counts) for one in named])
        return shares

    def counts(self, batch: TrainBatch, rows: Tensor) -> Counts:
        return Counts.of(batch, self.mini_batching.horizon, rows)

    def with_gradient(self, batch: TrainBatch, rows: Tensor) -> Tensor:
        """Indices among `rows` of the samples that an update needs: all, or those with an advantage.

        Never none: AdamW applies weight decay and moments with a gradient of 0 too, but not without a gradient. Of a
        mini-batch without an advantage this is the shortest sample with a token in the loss.
        """
        if not self.objective.skips_zero_advantages:
            return torch.arange(len(rows))
        used = batch.have_advantage(rows).nonzero().squeeze(1)
        if len(used):
            return used
        length_N, in_loss_N = batch.length_N[rows], batch.loss_tokens(rows) > 0
        return length_N.where(in_loss_N, int(length_N.max()) + 1).argmin().unsqueeze(0)

    def share_with_advantage(self, batch: TrainBatch) -> float:
        """Of the answers in the loss."""
        rows = torch.arange(len(batch))
        return self.counts(batch, rows[batch.have_advantage(rows)]).samples / max(self.counts(batch, rows).samples, 1)

    def update_flops(self, batch: TrainBatch, work: ModelWork) -> float:
        """Of all updates of a step. `work`: of this model."""
        length_N = batch.length_N[self.with_gradient(batch, torch.arange(len(batch)))]
        return float(work.update_flops(length_N).sum()) * self.mini_batching.epochs

    def chosen(self, batch: TrainBatch, rows: Tensor, divided: Rows) -> list[dict[str, Tensor]] | None:
        """chosen_T of each share, if the loss chooses tokens over the whole mini-batch. `divided`: indices among
        `rows`."""
        if self.objective.choose is None:
            return None
        chosen_T, ends = self.objective.choose(batch.select(rows)), token_ends(batch.length_N[rows])
        return [{"chosen_T": joined(chosen_T, ends, share)} for share in divided]

    def apply(self, learning_rate: float, batch: TrainBatch, shares: Rows, record: TokenRecord | None = None) -> Update:
        """An optimizer step on every worker. Their metrics are summands of the mini-batch's."""
        self.updates += 1
        arguments = [(learning_rate,)] * self.group.shares
        if record is None:
            updates: list[Update] = self.group.each("optim_step", arguments)
        else:
            updates = [one.get() for one in self.group.start("optim_step", arguments, stored=True).wait()]
        parts = [update.metrics for update in updates]
        names = dict.fromkeys(name for part in parts for name in part)  # a worker without a share has none
        ends = token_ends(batch.length_N)
        for rows, update in zip(shares, updates, strict=True):
            if record is not None and update.outputs is not None:
                record.put(ends, rows, update.outputs, batch)
        metrics = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
        return replace(updates[0], metrics=metrics, outputs=None)

    def watch(self, update: Update) -> None:
        self.nonfinite_in_a_row = 0 if update.applied else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row >= self.max_nonfinite:
            raise TrainingError(
                f"{self.nonfinite_in_a_row} {self.name} updates in a row had a gradient that is not finite "
                f"(trainer.max_nonfinite_updates={self.max_nonfinite}); none was applied. "
                f"{self.remedy}"
            )

    def save(self, folder: Path, contents: frozenset[str], background: bool = False) -> list[Path]:
        """The files that the workers write; see Engine.save."""
        (folder / self.name).mkdir(parents=True, exist_ok=True)
        of_shares: list[list[Path]] = self.group.call("save", folder / self.name, contents, background)
        return sorted({file for files in of_shares for file in files})

    def check_save(self, wait: bool) -> None:
        self.group.call("check_save", wait)

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        self.group.call("load", folder / self.name, contents)
