"""The order of a run's training rows: seeded, and resumable at any step."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rloom.errors import CheckpointError, ConfigError
from rloom.types import Prompt

R = TypeVar("R")


class EndOfData(Exception):
    """All epochs of a stream have been read."""


class RowStream(Generic[R]):
    """Full batches. Rows that do not fill a batch at the end of an epoch are dropped from that epoch."""

    def __init__(
        self,
        rows: Sequence[R],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        epochs: int | None = None,  # None: endless, the caller counts batches
        size_key: str = "data.train_batch_size",
    ) -> None:
        if not 1 <= batch_size <= len(rows):
            found = f"{len(rows)} rows; use 1 to {len(rows)}" if len(rows) != 1 else "1 row; use 1"
            raise ConfigError(f"{size_key}={batch_size}: the training data has {found}, or add data")
        if seed < 0:
            raise ConfigError(f"data.seed={seed}: must be 0 or more")
        self.steps_per_epoch = len(rows) // batch_size
        self.rows = rows
        self._epochs = epochs
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._row = 0  # next position in this epoch's order
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        return self._epoch

    def next(self) -> list[R]:
        """Raises EndOfData, and stays where it is, after the last batch of the last epoch."""
        next_epoch = self._row + self._batch_size > len(self.rows)
        if self._epochs is not None and self._epoch + next_epoch >= self._epochs:
            raise EndOfData
        if next_epoch:
            self._go_to(self._epoch + 1, row=0)
        start, self._row = self._row, self._row + self._batch_size
        return [self.rows[row] for row in self._order[start : self._row].tolist()]

    def state(self) -> dict[str, Any]:
        """The position and the settings that it depends on. Plain JSON."""
        return {"epoch": self._epoch, "row": self._row, **self._identity()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue at `state`. The batch size may differ: the position is counted in rows."""
        expected = self._identity()
        missing = [name for name in ("epoch", "row", *expected) if name not in state]
        if missing:
            raise CheckpointError(f"the saved data position lacks {', '.join(missing)}; resume from another checkpoint")
        changed = [f"{name} was {state[name]}, is {now}" for name, now in expected.items() if state[name] != now]
        if changed:
            raise CheckpointError(
                f"the saved data position does not fit this run: {'; '.join(changed)}. "
                "Set them back, or start again with trainer.resume_mode=disable"
            )
        epoch, row = state["epoch"], state["row"]
        if type(epoch) is not int or type(row) is not int or epoch < 0 or not 0 <= row <= len(self.rows):
            raise CheckpointError(
                f"the saved data position is damaged: epoch {epoch!r}, row {row!r} of {len(self.rows)}; "
                "resume from another checkpoint"
            )
        self._go_to(epoch, row=row)

    def _identity(self) -> dict[str, Any]:
        return {
            "rows": len(self.rows),
            "data.shuffle": self._shuffle,
            "data.seed": self._seed,
        }

    def _go_to(self, epoch: int, *, row: int) -> None:
        self._epoch, self._row, self._order = epoch, row, self._order_of(epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(len(self.rows))
        # Sort raw bits: numpy guarantees the stream of a bit generator across releases, but not Generator.permutation.
        bits = np.random.PCG64([self._seed, epoch]).random_raw(len(self.rows))
        return np.argsort(bits, kind="stable")


PromptStream = RowStream[Prompt]
