"""The batch of a step, sent to the workers once: calls name rows of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rloom.batch import Batch, token_ends
from rloom.runtime.group import Group, LazyArgument, Stored

Rows = Sequence[Sequence[int]]  # of each share


class PieceColumns(dict[str, Any]):
    """Columns of some rows of a batch, by name. Of tokens an array for each row, a view of the batch until it is sent;
    else one array, which is as long as the rows."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Tokens are sent in half of their bytes."""
        tokens = {"tokens_T": [row_L.astype(np.int32) for row_L in self["tokens_T"]]} if "tokens_T" in self else {}
        return PieceColumns, ({**self, **tokens},)


@dataclass(frozen=True)
class BatchRows(LazyArgument):
    """Rows of a batch that was put. The worker copies these, and no others."""

    kind: type[Batch]
    # each piece that has some of the rows: what was put of it at one time, and the names of the columns that count
    pieces: Sequence[Sequence[tuple[Stored, Sequence[str]]]]
    rows: Sequence[tuple[int, int]]  # (piece, row of it), in the order of the share
    empty: Mapping[str, NDArray[Any]]  # each column without a row
    more: Mapping[str, Tensor]  # columns of these rows that were not put

    def make(self) -> Batch:
        columns = [columns_of(piece) for piece in self.pieces]
        found = {one.name: self.more.get(one.name) for one in fields(self.kind)}
        for name, none in self.empty.items():
            parts = [columns[piece][name][row] for piece, row in self.rows]
            joined = np.array(parts) if name.endswith("_N") else np.concatenate([none, *parts])
            found[name] = torch.from_numpy(joined.astype(none.dtype, copy=False))
        return self.kind(**found)  # type: ignore[arg-type]


def columns_of(piece: Sequence[tuple[Stored, Sequence[str]]]) -> dict[str, Any]:
    """As in PieceColumns."""
    found: dict[str, Any] = {}
    for stored, names in piece:
        values = stored.get()
        if isinstance(values, Tensor):  # a worker's outputs for the tokens of the piece, its rows one after the other
            values = {names[0]: np.split(values.numpy(), found["length_N"].cumsum()[:-1])}
        found |= {name: values[name] for name in names}
    return found


@dataclass(frozen=True)
class BatchStore:
    """The columns of a step's batch: each is put when it is first needed, once for all roles.

    Rows are put in pieces, one for each share of the group. A worker reads the pieces that hold its rows: if that is
    its own one in all calls, a machine gets the pieces of its workers only.
    """

    group: Group
    length_N: Tensor
    pieces: Rows
    # what was put at one time: tensors of the whole batch by name, and the columns of each piece
    put: list[tuple[dict[str, Tensor], list[Stored]]] = field(default_factory=list)
    # outputs of a model for the whole batch, and those of each piece as its worker has put them: not sent again
    outputs: list[tuple[Tensor, list[Stored]]] = field(default_factory=list)

    @cached_property
    def ends(self) -> list[int]:
        return token_ends(self.length_N)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """By row of the batch: (piece, row of it)."""
        return {row: (piece, index) for piece, rows in enumerate(self.pieces) for index, row in enumerate(rows)}

    def rows(self, batch: Batch, shares: Rows, more: Sequence[Mapping[str, Tensor]] | None = None) -> list[BatchRows]:
        """The rows of each share. `more`: columns for each share's rows alone."""
        columns = batch.columns
        self.put_missing(columns)
        used = [
            (stored, names)
            for tensors, stored in self.put
            if (names := [name for name, tensor in tensors.items() if columns.get(name) is tensor])
        ] + [
            (stored, [name])
            for output_T, stored in self.outputs
            for name, tensor in columns.items()
            if tensor is output_T
        ]
        empty = {name: tensor[:0].numpy() for name, tensor in columns.items()}
        found = []
        for number, share in enumerate(shares):
            places = [self.places[row] for row in share]
            needed = sorted({piece for piece, _ in places})
            pieces = [[(stored[piece], names) for stored, names in used] for piece in needed]
            rows = [(needed.index(piece), row) for piece, row in places]
            found.append(BatchRows(type(batch), pieces, rows, empty, {} if more is None else more[number]))
        return found

    def put_missing(self, columns: Mapping[str, Tensor]) -> None:
        missing = {
            name: tensor
            for name, tensor in columns.items()
            if not any(tensors.get(name) is tensor for tensors, _ in self.put)
            and not any(tensor is output_T for output_T, _ in self.outputs)
        }
        if missing:
            self.put.append((missing, [self.group.put(self.cut(missing, rows)) for rows in self.pieces]))

    def cut(self, tensors: Mapping[str, Tensor], rows: Sequence[int]) -> PieceColumns:
        found = PieceColumns()
        for name, tensor in tensors.items():
            values, ends = tensor.numpy(), self.ends
            by_row = name.endswith("_N")
            found[name] = values[[*rows]] if by_row else [values[ends[row] : ends[row + 1]] for row in rows]
        return found
